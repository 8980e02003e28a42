# Copyright (c) the d2_memfit developers.
"""The mapper of a job's loader, and empty image files of any size for it."""

import copy
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any, Optional

import numpy as np
import torch
from detectron2.data import DatasetCatalog, build, common, detection_utils
from detectron2.data.transforms import ResizeShortestEdge, ResizeTransform, Transform
from detectron2.structures import BoxMode
from numpy.lib.stride_tricks import as_strided
from PIL import Image

from ..common.compat import map_datasets
from ..common.patching import Group, modules_with, replaced_functions, with_original
from ..common.side_work import aside
from .datasets import Size, boxes_anywhere, dict_of, invented_dict, num_objects_of, statistics_of

__all__ = ["CapturedLoader", "EmptyFiles", "capture_loader", "empty_files"]

_NUM_DICTS = 1000  # enough for samplers that take a share
_NUM_PROPOSALS = 5000  # per image, if their file is missing; mappers keep fewer
_TILE = 8  # pixels of a label's tile, at most
_TIMES = 4  # that an image has each label, at least, unless it has too few pixels
_GOLDEN = 0.618  # its multiples are spread evenly


@dataclass
class CapturedLoader:
    """What was captured while a loader was made.

    Attributes:
        mappers: the mappers of its ``MapDataset`` objects, in the order of creation.
        names: names of the requested datasets.
        first: the first dict for a mapper, with what the loader adds, such as its source.
    """

    mappers: list[Callable[..., Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    first: dict[str, Any] = field(default_factory=dict)

    def dict_of(self, d: dict[str, Any], size: Size, num: Optional[int] = None) -> dict[str, Any]:
        """A dict for the mappers, with another size and number of objects."""
        return {**self.first, **dict_of(d, size, num)}


def capture_loader(make_loader: Callable[[], Any], with_labels: bool = False) -> CapturedLoader:
    """Make a loader without reading anything. Its datasets may be missing.

    Args:
        with_labels: as for :func:`~.datasets.invented_dict`.
    """
    captured = CapturedLoader()

    def note_mapper(init: Any, self: Any, dataset: Any, map_func: Callable[..., Any]) -> None:
        captured.mappers.append(map_func)
        is_list = isinstance(dataset, (list, common.DatasetFromList))
        if is_list and len(dataset) and isinstance(dataset[0], dict):
            captured.first = dataset[0]
        init(self, dataset, map_func)

    def get_one_dict(get: Any, catalog: Any, name: str) -> list[dict[str, Any]]:
        captured.names.append(name)
        with replaced_functions(([type(catalog)], {"get": lambda _: get})):
            statistics = statistics_of([name])  # which may be made of another dataset
        if statistics is None:
            return [invented_dict((480, 640), 2, name, with_labels)] * _NUM_DICTS
        d = statistics.most_crowded
        num = num_objects_of(d) or 1  # loaders leave out what has none
        return [dict_of(d, (d["height"], d["width"]), num)] * _NUM_DICTS

    proposals = {
        "proposal_boxes": boxes_anywhere(_NUM_PROPOSALS, (32, 32), seed=1),  # in any image
        "proposal_objectness_logits": np.zeros(_NUM_PROPOSALS),
        "proposal_bbox_mode": BoxMode.XYXY_ABS,
    }

    def add_proposals(_: Any, dicts: Sequence[dict[str, Any]], file: str) -> list[dict[str, Any]]:
        return [{**d, **proposals} for d in dicts]

    # A loader has its mapper, and the names of its datasets, only while it is made.
    groups: list[Group] = [
        (map_datasets, {"__init__": with_original(note_mapper)}),
        ([type(DatasetCatalog)], {"get": with_original(get_one_dict)}),
        ([build], {"load_proposals_into_dataset": with_original(add_proposals)}),
    ]
    with aside(), replaced_functions(*groups), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of workers, which do not start
        make_loader()
    return captured


@dataclass
class EmptyFiles:
    """Image files without pixels, in memory until a mapper reads them with another function.

    Attributes:
        labels: values of label images.
        folder: for the files.
        images: their pixels, by path.
        exist: whether they are on the disk.
        resizes: the largest lengths of the shorter side, and the limits of the longer side, that
            ``ResizeShortestEdge`` had.
    """

    labels: Sequence[int]
    folder: str
    images: dict[str, Any] = field(default_factory=dict)
    exist: bool = False
    resizes: set[Size] = field(default_factory=set)

    def run(self, map_func: Callable[..., Any], d: dict[str, Any], seed: int) -> Any:
        """The result of a mapper for a dict, with the random numbers of a seed."""
        if not self.exist:
            with suppress(Exception):
                if (data := map_func(self._named(d, seed))) is not None:
                    return data
            self.exist = True  # the mapper may read them with a function of its own
        return map_func(self._named(d, seed))

    def _named(self, d: dict[str, Any], seed: int) -> dict[str, Any]:
        """A dict with the names of empty files in place of its own."""
        random.seed(seed)
        np.random.seed(seed)
        torch.default_generator.manual_seed(seed)
        d = copy.deepcopy(d)
        colors = [[s["id"] // 256**n % 256 for n in range(3)] for s in d.get("segments_info", ())]
        size = d["height"], d["width"]
        for key in {"file_name", "sem_seg_file_name", "pan_seg_file_name"} & d.keys():
            name = f"{key}_{size[0]}x{size[1]}_{len(colors)}.png"
            d[key] = path = os.path.join(self.folder, name)
            if path not in self.images and key == "file_name":
                self.images[path] = _empty((*size, 3))
            elif path not in self.images:
                values = self.labels if key == "sem_seg_file_name" else colors or [[0, 0, 0]]
                self.images[path] = tiles(size, values)
            if self.exist and not os.path.exists(path):
                pixels = np.ascontiguousarray(self.images[path])
                Image.fromarray(pixels).save(path, compress_level=1)
        return d


def _empty(shape: tuple[int, ...], dtype: Any = np.uint8) -> Any:
    """An image whose pixels are all the same number in memory."""
    return as_strided(np.zeros(1, dtype), shape, (0,) * len(shape))


def tiles(size: Size, values: Sequence[Any]) -> Any:
    """Make an image of small tiles, with all values in each part that a crop may take.

    Args:
        size: height and width in pixels.
        values: values of tiles, numbers or colors, in turn; 0 if there are none.

    Returns:
        ndarray: [height, width], or [height, width, 3] for colors.
    """
    palette = np.asarray(values or [0])
    palette = palette.astype(np.uint8 if palette.max() < 256 else np.uint16)
    num = len(palette)
    side = max(1, min(_TILE, math.isqrt(math.prod(size) // (_TIMES * num))))
    rows, columns = (np.arange(-(-length // side)) for length in size)
    # Rows begin far from each other, so that a few of them have all values.
    image = palette[(columns + round(_GOLDEN * num) * rows[:, None]) % num]
    return image.repeat(side, axis=0).repeat(side, axis=1)[: size[0], : size[1]]


@contextmanager
def empty_files(labels: Sequence[int] = ()) -> Iterator[EmptyFiles]:
    """While open, mappers can be run on the yielded files.

    Detectron2's ``read_image`` knows them, ``ResizeTransform`` resizes them without computing, and
    ``ResizeShortestEdge``, or a project's copy of that class, uses the length that makes the
    largest image. Nothing is logged, and the job's random numbers are not drawn.

    Args:
        labels: values of label images.
    """

    def read_empty(read_image: Any, file_name: str, format: Optional[str] = None) -> Any:
        image = files.images.get(file_name)
        if image is None:
            return read_image(file_name, format)
        return image.reshape(*image.shape[:2], -1)[..., :1] if format == "L" else image

    def resize_empty(apply_image: Any, self: Any, img: Any, *args: Any, **kwargs: Any) -> Any:
        if any(img.strides) and img.any():
            return apply_image(self, img, *args, **kwargs)
        return _empty((self.new_h, self.new_w, *img.shape[2:]), img.dtype)

    def take_largest(get_transform: Any, self: Any, image: Any, *args: Any) -> Transform:
        size, limit = image.shape[:2], int(min(self.max_size, 10**6))
        lengths = self.short_edge_length
        longest = max(lengths, key=lambda length: math.prod(resized(size, length, limit)))
        files.resizes.add((longest, limit))
        fixed = copy.copy(self)
        fixed.short_edge_length = [longest] * 2
        return get_transform(fixed, image, *args)

    readers = [m for m, f in modules_with("read_image") if f is detection_utils.read_image]
    # Mappers make and call their augmentations themselves, with lengths that are drawn at random.
    classes = {c for _, c in modules_with("ResizeShortestEdge") if isinstance(c, type)}
    resizes = [c for c in classes if "get_transform" in vars(c)]
    replaced: list[Group] = [
        (readers, {"read_image": with_original(read_empty)}),
        (resizes, {"get_transform": with_original(take_largest)}),
        ([ResizeTransform], {"apply_image": with_original(resize_empty)}),
    ]
    with TemporaryDirectory() as folder, aside(), replaced_functions(*replaced):
        files = EmptyFiles(labels, folder)
        yield files


def resized(size: Size, short: int, long: int) -> Size:
    """Resize like ``ResizeShortestEdge``; a shorter side of 0 keeps the size."""
    return size if short == 0 else ResizeShortestEdge.get_output_shape(*size, short, long)
