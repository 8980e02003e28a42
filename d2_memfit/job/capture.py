# Copyright (c) the d2_memfit developers.
"""The mapper captured from a job's loader, and empty images of any size for it."""

import copy
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, Optional

import numpy as np
import torch
from detectron2.data import DatasetCatalog, build, common, detection_utils, transforms
from detectron2.data.transforms import NoOpTransform, Transform
from detectron2.structures import BoxMode
from numpy.lib.stride_tricks import as_strided
from PIL import Image

from ..common.patching import modules_with, replaced_functions, replaced_together
from ..common.side_work import alone, no_information, unchanged_random_state
from .batches import size_of
from .chosen_draws import ChosenDraws
from .dataset_statistics import statistics_of
from .label_images import tiles
from .largest_images import Size, boxes_anywhere, invented_dict

__all__ = ["CapturedLoader", "EmptyImages", "capture_loader", "empty_images", "largest_resizes"]

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


class _Augmented(BaseException):
    """Stops a mapper. No mapper catches it."""


class EmptyImages:
    """Images without pixels for a mapper, whose random numbers are chosen.

    Args:
        labels: values of label images.
        folder: for the files, if they are to exist.

    Attributes:
        exist: whether the files exist, for a mapper that reads them by a function of its own.
        stops: whether only sizes count: a mapper stops after its augmentations.
        resizes: the largest length of the shorter side, and the limit of the longer side, of each
            ``ResizeShortestEdge`` so far.
        draws: the random numbers.
        augmented: sizes of images after each list of augmentations that the mapper applied.
    """

    def __init__(self, labels: Sequence[int], folder: str) -> None:
        self._labels = labels
        self._folder = folder
        self._names: dict[tuple[str, Size, tuple[int, ...]], str] = {}  # kind, size, segments
        self._known: dict[str, tuple[str, Size, tuple[int, ...]]] = {}
        self.exist = False
        self.stops = False
        self.resizes: set[tuple[int, int]] = set()
        self.draws = ChosenDraws()
        self.augmented: list[Size] = []

    def name(self, d: dict[str, Any]) -> None:
        """Replace a dataset dict's file names, if it has any."""
        ids = tuple(segment["id"] for segment in d.get("segments_info", ()))
        for key in ("file_name", "sem_seg_file_name", "pan_seg_file_name"):
            if key in d:
                image = key, (d["height"], d["width"]), ids
                name = f"largest_image_{len(self._known)}.png"
                d[key] = self._names.setdefault(image, os.path.join(self._folder, name))
                self._known[d[key]] = image
                if self.exist and not os.path.exists(d[key]):
                    pixels = self._pixels(d[key], None, is_empty=False)
                    Image.fromarray(np.ascontiguousarray(pixels)).save(d[key], compress_level=1)

    def read(self, name: str, format: Optional[str]) -> Optional[Any]:
        """An empty image, like Detectron2's ``read_image``; None for another file."""
        return self._pixels(name, format, self.stops) if name in self._known else None

    def _pixels(self, name: str, format: Optional[str], is_empty: bool) -> Any:
        kind, size, ids = self._known[name]
        if kind == "sem_seg_file_name":
            image = _empty(size) if is_empty else tiles(size, self._labels)
            return image[..., None] if format == "L" else image
        if kind == "pan_seg_file_name" and not is_empty:
            return tiles(size, [[i // 256**n % 256 for n in range(3)] for i in ids or [0]])
        return _empty((*size, 1 if format == "L" else 3))

    def size_from(self, run: Callable[[], Any]) -> Size:
        """Height and width of the image that a mapper gives; 0 if it fails."""
        self.augmented = []
        try:
            return size_of(run())
        except _Augmented:
            return self.augmented[0]
        except Exception:  # such as a resize of a crop without pixels
            return 0, 0


def _empty(shape: tuple[int, ...], dtype: Any = np.uint8) -> Any:
    """An image whose pixels are all the same number in memory."""
    return as_strided(np.zeros(1, dtype), shape, (0,) * len(shape))


# Height and width of an image after a transform.
_SIZES_AFTER: dict[str, Callable[[Any, int, int], Size]] = {
    "BlendTransform": lambda _, height, width: (height, width),
    "ExtentTransform": lambda t, *_: t.output_size,
    "PadTransform": lambda t, height, width: (height + t.y0 + t.y1, width + t.x0 + t.x1),
    "ResizeTransform": lambda t, *_: (t.new_h, t.new_w),
    "RotationTransform": lambda t, *_: (t.bound_h, t.bound_w),
}
_COLOURS = ("RandomBrightness", "RandomContrast", "RandomLighting", "RandomSaturation")


@contextmanager
def empty_images(labels: Sequence[int] = ()) -> Iterator[EmptyImages]:
    """While open, ``read_image`` gives the yielded images for their names.

    Transforms of Detectron2 change their sizes only, and colours do not change. Nothing is logged.

    Args:
        labels: values of label images.
    """
    original = detection_utils.read_image
    depth = 0

    def read_empty(_: Callable[..., Any]) -> Callable[..., Any]:
        def read_image(file_name: str, format: Optional[str] = None) -> Any:
            image = images.read(file_name, format)
            return original(file_name, format) if image is None else image

        return read_image

    def resize_empty(size_after: Callable[..., Size], apply_image: Callable[..., Any]) -> Any:
        def apply(self: Any, img: Any, *args: Any, **kwargs: Any) -> Any:
            if any(img.strides) and img.any():
                return apply_image(self, img, *args, **kwargs)
            return _empty((*size_after(self, *img.shape[:2]), *img.shape[2:]), img.dtype)

        return apply

    def stop_after(call: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(self: Any, aug_input: Any) -> Any:
            nonlocal depth
            depth += 1
            try:
                done = call(self, aug_input)
            finally:
                depth -= 1
            if not depth:
                images.augmented.append(aug_input.image.shape[:2])
            if images.stops and not depth:
                raise _Augmented
            return done

        return __call__

    def keep_colours(_: Callable[..., Any]) -> Callable[..., Any]:
        def get_transform(self: Any, image: Any) -> Transform:
            return NoOpTransform()

        return get_transform

    def crop_anywhere(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_transform(self: Any, image: Any, sem_seg: Any) -> Transform:
            if images.stops:  # counting the pixels of each class takes long
                return self.crop_aug.get_transform(image)
            return original(self, image, sem_seg)

        return get_transform

    def note_lengths(get_transform: Callable[..., Transform]) -> Callable[..., Transform]:
        def get_noted_transform(self: Any, image: Any) -> Transform:
            images.resizes.add((max(self.short_edge_length), int(min(self.max_size, 10**6))))
            return get_transform(self, image)

        return get_noted_transform

    known = [module for module, function in modules_with("read_image") if function is original]
    changes: list[tuple[list[Any], dict[str, Any]]] = [
        (known, {"read_image": read_empty}),
        *(
            ([getattr(transforms, name)], {"apply_image": partial(resize_empty, size_after)})
            for name, size_after in _SIZES_AFTER.items()
        ),
        ([getattr(transforms, name) for name in _COLOURS], {"get_transform": keep_colours}),
        ([transforms.RandomCrop_CategoryAreaConstraint], {"get_transform": crop_anywhere}),
        ([transforms.AugmentationList], {"__call__": stop_after}),
        (_resizes(), {"get_transform": note_lengths}),
    ]
    with (
        TemporaryDirectory() as folder,
        alone(),
        no_information(),
        unchanged_random_state(),
    ):
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)
        images = EmptyImages(labels, folder)
        with replaced_together([*changes, *images.draws.replacements()]):
            yield images


@contextmanager
def largest_resizes() -> Iterator[None]:
    """While open, ``ResizeShortestEdge`` uses the largest of its lengths.

    So do a project's copies of that class.
    """

    def take_largest(get_transform: Callable[..., Transform]) -> Callable[..., Transform]:
        def get_largest_transform(self: Any, image: Any) -> Transform:
            fixed = copy.copy(self)
            fixed.short_edge_length = [max(self.short_edge_length)] * 2
            return get_transform(fixed, image)

        return get_largest_transform

    # Mappers make and call their augmentations themselves, with lengths that are drawn at random.
    with replaced_functions(_resizes(), {"get_transform": take_largest}):
        yield


def _resizes() -> list[Any]:
    known = {c for _, c in modules_with("ResizeShortestEdge") if isinstance(c, type)}
    return [c for c in known if "get_transform" in vars(c)]
