# Copyright (c) the d2_memfit developers.
"""The mapper captured from a job's loader, and empty images of any size for it."""

import copy
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any, Optional

import numpy as np
import torch
from detectron2.data import DatasetCatalog, build, common, detection_utils
from detectron2.data.transforms import ResizeTransform, Transform
from detectron2.structures import BoxMode
from PIL import Image

from ..common.patching import Groups, modules_with, replaced_together
from ..common.side_work import alone, no_information, unchanged_random_state
from .dataset_statistics import statistics_of
from .label_images import tiles
from .largest_images import Size, boxes_anywhere, invented_dict

__all__ = ["CapturedLoader", "capture_loader", "empty_images", "largest_resizes"]

_NUM_DICTS = 1000  # enough for samplers that take a share
_NUM_PROPOSALS = 5000  # per image, if their file is missing; mappers keep fewer


@dataclass
class CapturedLoader:
    """What was captured while a loader was made.

    Attributes:
        mappers: the mappers of its ``MapDataset`` objects, in the order of creation.
        names: names of the requested datasets.
        has_proposals: whether it reads precomputed proposals.
        added: what it adds to the dicts of its datasets, such as their source, by key.
    """

    mappers: list[Callable[..., Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    has_proposals: bool = False
    added: dict[str, Any] = field(default_factory=dict)


def capture_loader(make_loader: Callable[[], Any], with_labels: bool = False) -> CapturedLoader:
    """Make a loader without reading anything. Its datasets may be missing.

    Args:
        with_labels: as for :func:`~.largest_images.invented_dict`.
    """
    captured = CapturedLoader()
    given: set[str] = set()

    def note_mapper(init: Callable[..., None]) -> Callable[..., None]:
        def noting_init(self: Any, dataset: Any, map_func: Callable[..., Any]) -> None:
            captured.mappers.append(map_func)
            is_list = isinstance(dataset, (list, common.DatasetFromList))
            first = dataset[0] if is_list and len(dataset) else None
            if isinstance(first, dict):
                captured.added.update({key: first[key] for key in first.keys() - given})
            init(self, dataset, map_func)

        return noting_init

    def get_one_dict(original: Callable[..., Any]) -> Callable[..., Any]:
        is_inner = False

        def get(self: Any, name: str) -> list[dict[str, Any]]:
            nonlocal is_inner
            if is_inner:  # another dataset is made of it
                return original(self, name)
            captured.names.append(name)
            is_inner = True
            try:
                statistics = statistics_of([name])
            finally:
                is_inner = False
            if statistics is None:
                d = invented_dict((480, 640), 2, name, with_labels)
            else:
                d = statistics.any_dict()
            given.update(d)
            return [d] * _NUM_DICTS

        return get

    def keep_dicts(_: Callable[..., Any]) -> Callable[..., Any]:
        def load_proposals_into_dataset(dicts: Any, file: str) -> Any:
            captured.has_proposals = True
            return dicts

        return load_proposals_into_dataset

    maps = [getattr(common, n) for n in ("MapDataset", "_MapIterableDataset") if hasattr(common, n)]
    # A loader has its mapper, and the names of its datasets, only while it is made.
    groups: list[tuple[list[Any], dict[str, Any]]] = [
        (maps, {"__init__": note_mapper}),
        ([type(DatasetCatalog)], {"get": get_one_dict}),
        ([build], {"load_proposals_into_dataset": keep_dicts}),
    ]
    with (
        alone(),
        unchanged_random_state(),
        no_information(),
        replaced_together(groups),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # warnings of workers, which do not start
        make_loader()
    return captured


def with_proposals(d: dict[str, Any]) -> dict[str, Any]:
    """A dataset dict with proposals."""
    return {
        **d,
        "proposal_boxes": boxes_anywhere(_NUM_PROPOSALS, (d["height"], d["width"]), seed=1),
        "proposal_objectness_logits": np.zeros(_NUM_PROPOSALS),
        "proposal_bbox_mode": BoxMode.XYXY_ABS,
    }


class _EmptyFiles:
    """File names that do not exist, for images of a given size.

    Args:
        labels: values of label images.
        folder: for the files, if they are to exist.

    Attributes:
        exist: whether the files exist, for a mapper that reads them by a function of its own.
    """

    def __init__(self, labels: Sequence[int], folder: str) -> None:
        self._labels = labels
        self._folder = folder
        self._known: dict[str, tuple[str, Size, list[int]]] = {}  # kind, size, ids of segments
        self.exist = False

    def name(self, d: dict[str, Any]) -> None:
        """Replace a dataset dict's file names, if it has any."""
        ids = [segment["id"] for segment in d.get("segments_info", ())]
        for key in ("file_name", "sem_seg_file_name", "pan_seg_file_name"):
            if key in d:
                d[key] = os.path.join(self._folder, f"largest_image_{len(self._known)}.png")
                self._known[d[key]] = key, (d["height"], d["width"]), ids
                if self.exist:
                    Image.fromarray(self.read(d[key], None)).save(d[key], compress_level=1)

    def read(self, name: str, format: Optional[str]) -> Optional[Any]:
        """An empty image, like Detectron2's ``read_image``; None for another file."""
        if name not in self._known:
            return None
        kind, size, ids = self._known[name]
        if kind == "sem_seg_file_name":
            image = tiles(size, self._labels)
            return image[..., None] if format == "L" else image
        if kind == "pan_seg_file_name":
            return tiles(size, [[i // 256**n % 256 for n in range(3)] for i in ids or [0]])
        return np.zeros((*size, 1 if format == "L" else 3), np.uint8)


@contextmanager
def empty_images(
    labels: Sequence[int] = (),
) -> Iterator[tuple[_EmptyFiles, set[tuple[int, int]]]]:
    """While open, ``read_image`` gives empty images for the names of the yielded object.

    They are resized as in :func:`largest_resizes`, whose pairs are yielded, too. Nothing is logged,
    and random numbers are the same each time.

    Args:
        labels: values of label images.
    """
    original = detection_utils.read_image

    def read_empty(_: Callable[..., Any]) -> Callable[..., Any]:
        def read_image(file_name: str, format: Optional[str] = None) -> Any:
            image = files.read(file_name, format)
            return original(file_name, format) if image is None else image

        return read_image

    def resize_empty(apply_image: Callable[..., Any]) -> Callable[..., Any]:
        def apply(self: Any, img: Any, interp: Any = None) -> Any:
            if img.any():
                return apply_image(self, img, interp)
            return np.zeros((self.new_h, self.new_w, *img.shape[2:]), img.dtype)

        return apply

    known = [module for module, function in modules_with("read_image") if function is original]
    reads: list[tuple[list[Any], dict[str, Any]]] = [
        (known, {"read_image": read_empty}),
        ([ResizeTransform], {"apply_image": resize_empty}),  # a tenth of the time
    ]
    with (
        TemporaryDirectory() as folder,
        alone(),
        no_information(),
        unchanged_random_state(),
        largest_resizes(reads) as resizes,
    ):
        files = _EmptyFiles(labels, folder)
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)
        yield files, resizes


@contextmanager
def largest_resizes(others: Groups = ()) -> Iterator[set[tuple[int, int]]]:
    """While open, ``ResizeShortestEdge`` uses the largest of its lengths.

    So do a project's copies of that class. Yields the pairs of shorter and longest side that they
    were used with.

    Args:
        others: functions that are replaced for the same time.
    """
    used: set[tuple[int, int]] = set()

    def take_largest(get_transform: Callable[..., Transform]) -> Callable[..., Transform]:
        def get_largest_transform(self: Any, image: Any) -> Transform:
            fixed = copy.copy(self)
            fixed.short_edge_length = [max(self.short_edge_length)] * 2
            used.add((fixed.short_edge_length[0], int(min(self.max_size, 10**6))))
            return get_transform(fixed, image)

        return get_largest_transform

    known = {c for _, c in modules_with("ResizeShortestEdge") if isinstance(c, type)}
    resizes = [c for c in known if "get_transform" in vars(c)]
    # Mappers make and call their augmentations themselves, with lengths that are drawn at random.
    with replaced_together([(resizes, {"get_transform": take_largest}), *others]):
        yield used
