# Copyright (c) the d2_memfit developers.
"""The images of a job's dataset that need the most memory, read from their files."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from detectron2.data import DatasetCatalog

from ..common.side_work import alone, no_information, unchanged_random_state
from ..errors import ConfigError
from .batches import need_of
from .capture import CapturedLoader, capture_loader, largest_resizes
from .dataset_statistics import statistics_of
from .largest_images import num_instances_of
from .parts import Parts

__all__ = ["readable_loader", "worst_real_images"]

_TRIES = 20  # for a mapper that may drop an image


def worst_real_images(parts: Parts, num_images: int) -> list[Any]:
    """Read and map the most crowded images and the largest ones; return the largest results.

    Args:
        parts: the job's parts. The mapper of its training loader is used as it is, with
            ``ResizeShortestEdge`` at its largest.
        num_images: number of images.

    Raises:
        ConfigError: the training dataset cannot be read, or has fewer images.
    """
    loader = readable_loader(parts)
    with alone(), no_information(), unchanged_random_state():
        dicts = [d for name in loader.names for d in DatasetCatalog.get(name)]
        crowded = sorted(dicts, key=num_instances_of)[-num_images:]
        large = sorted(dicts, key=lambda d: d.get("height", 0) * d.get("width", 0))[-num_images:]
        candidates = list({id(d): d for d in (*crowded, *large)}.values())
        with largest_resizes():
            images = [_mapped(loader.mappers, {**loader.added, **d}) for d in candidates]
    if len(images) < num_images:
        names = ", ".join(loader.names)
        raise ConfigError(f"{names} has {len(images)} images, and {num_images} are needed")
    return sorted(images, key=need_of)[-num_images:]


def readable_loader(parts: Parts) -> CapturedLoader:
    """The captured training loader of parts whose dataset is on this machine.

    Raises:
        ConfigError: it cannot be read.
    """
    loader = capture_loader(parts.build_train_loader)
    names = ", ".join(loader.names)
    if not names or not loader.mappers or statistics_of(loader.names) is None:
        raise ConfigError(f"the training dataset {names or 'without a name'} cannot be read")
    return loader


def _mapped(mappers: Sequence[Callable[..., Any]], d: dict[str, Any]) -> Any:
    for i in range(_TRIES):
        image = mappers[i % len(mappers)](copy.deepcopy(d))
        if image is not None:
            return image
    raise ConfigError("the training mapper gives nothing for an image of the dataset")
