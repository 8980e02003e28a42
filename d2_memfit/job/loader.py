# Copyright (c) the d2_memfit developers.
"""Loaders that check their dataset first, and name the image that cannot be loaded."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Callable

from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog, common
from detectron2.utils import comm

from ..common.compat import map_datasets
from ..common.errors import DataError
from ..common.patching import Group, replaced_functions, with_original
from ..data.faults import check, kinds_of, look_at_annotations, look_at_images, warnings_about
from ..memory import is_loader_out_of_memory
from ..techniques.host import SharedList

__all__ = ["checked_loader", "checked_test_loaders"]

logger = logging.getLogger(__name__)


def checked_loader(build_loader: Callable[..., Any], cfg: CfgNode) -> Callable[..., Any]:
    """Wrap a function that builds a training loader, so that the dataset is checked first.

    Oddities of the dataset dicts are logged. An image that cannot be loaded is named in the error.
    Ranks do not wait for each other: a loader may be made on one alone.

    Args:
        build_loader: gets all arguments.
        cfg: says what is checked in addition to boxes, if it names datasets. That of a LazyConfig
            or of pieces does not.

    Raises:
        DataError: in the call, or while the loader is iterated.
    """
    return _checking(_check_dicts, cfg)(build_loader)


def checked_test_loaders(cfg: CfgNode) -> AbstractContextManager[None]:
    """While open, Detectron2's test loaders name an image that cannot be loaded.

    They refuse polygons that cannot be drawn, warn of a dataset without annotations, and share it
    if MEMFIT.HOST.SHARED_DATASET.

    Raises:
        DataError: when a loader is built or iterated.
    """
    return _checking(_check_test_dicts, cfg)


@contextmanager
def _checking(check: Callable[[Any, CfgNode], None], cfg: CfgNode) -> Iterator[None]:
    """While open, Detectron2's ``DatasetFromList`` checks, and its ``MapDataset`` names images.

    The first also shares its items with other processes, if MEMFIT.HOST.SHARED_DATASET.
    """

    def check_list(init: Any, self: Any, lst: Any, *args: Any, **kwargs: Any) -> None:
        first = lst[0] if isinstance(lst, list) and lst else None
        if isinstance(first, Mapping) and "annotations" in first:
            check(lst, cfg)
        if cfg.MEMFIT.HOST.SHARED_DATASET:
            init(self, SharedList(lst), copy=False, serialize=False)
        else:
            init(self, lst, *args, **kwargs)

    def name_images(init: Any, self: Any, dataset: Any, map_func: Callable[..., Any]) -> None:
        init(self, dataset, _NamesImage(map_func))

    groups: list[Group] = [
        ([common.DatasetFromList], {"__init__": with_original(check_list)}),
        (map_datasets, {"__init__": with_original(name_images)}),
    ]
    with replaced_functions(*groups):
        yield


def _check_dicts(dicts: Sequence[Mapping[str, Any]], cfg: CfgNode) -> None:
    """Raise an error on each rank; look at images, and warn, on rank 0."""
    summary, names = look_at_annotations(dicts), cfg.DATASETS.TRAIN
    check(summary, kinds_of(cfg) if names else {"box"})
    if not comm.is_main_process():
        return
    named = [d for d in dicts if isinstance(d.get("file_name"), str)]
    look_at_images(summary, named)
    if not summary.num_opened:  # the names are not files; only the mapper can read them
        summary.cases.pop("missing", None)
    class_names = MetadataCatalog.get(names[0]).get("thing_classes") if names else None
    for warning in warnings_about(cfg if names else None, summary, class_names):
        logger.warning(warning)


def _check_test_dicts(dicts: Sequence[Mapping[str, Any]], cfg: CfgNode) -> None:
    if not any(image.get("annotations") for image in dicts):
        logger.warning(
            "None of the %d images to evaluate on has an annotation, so there will be no AP. Is "
            "DATASETS.TEST right?",
            len(dicts),
        )
    if cfg.MODEL.MASK_ON:
        check(look_at_annotations(dicts), {"mask"})


class _NamesImage:
    """A mapper whose errors name the image. Its attributes are the mapper's."""

    def __init__(self, mapper: Callable[[Any], Any]) -> None:
        self._mapper = mapper

    def __call__(self, item: Any) -> Any:
        name = item.get("file_name") if isinstance(item, Mapping) else None
        try:
            return self._mapper(item)
        except Exception as e:
            if name is None or isinstance(e, DataError) or is_loader_out_of_memory(e):
                raise
            raise DataError(
                f"the image {name} cannot be loaded, or its annotations do not go with it "
                f"({type(e).__name__}: {' '.join(str(e).split())[:300]}). Correct it, or take its "
                "entry out of the dataset"
            ) from e

    def __getattr__(self, name: str) -> Any:
        if name == "_mapper":  # during unpickling
            raise AttributeError
        return getattr(self._mapper, name)
