# Copyright (c) the d2_memfit developers.
"""Sizes of images after augmentation, drawn as a loader does, but without reading images."""

import random
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from detectron2.data.transforms import (
    AugmentationList,
    PadTransform,
    RandomFlip,
    ResizeShortestEdge,
    ResizeTransform,
)
from fvcore.transforms.transform import (
    BlendTransform,
    CropTransform,
    HFlipTransform,
    NoOpTransform,
    Transform,
    TransformList,
    VFlipTransform,
)

from ..common.random_state import RandomState
from ..common.side_work import unchanged_random_state
from ..job import Size, size_of

__all__ = ["DrawnSizes", "UnknownDraws"]

_SAME_SIZE = (NoOpTransform, HFlipTransform, VFlipTransform, BlendTransform)


class UnknownDraws(Exception):
    """A mapper's sizes cannot be drawn without its images. The message says why."""


class DrawnSizes:
    """Draws the random numbers of a mapper's augmentations, which determine the sizes of images.

    Args:
        mapper: with ``augmentations`` or ``tfm_gens``, like the mappers of Detectron2.

    Raises:
        UnknownDraws: it has neither.
    """

    def __init__(self, mapper: Any) -> None:
        for name in ("augmentations", "tfm_gens"):
            found = getattr(mapper, name, None)
            if found is not None:
                self._draws = [partial(_DRAWS.get(type(a), _draw), a) for a in _flat(found)]
                return
        raise UnknownDraws("its mapper has no list of augmentations")

    def draw(self, size: Size) -> Size:
        """Draw the augmentations of one image.

        Raises:
            UnknownDraws: an augmentation needs more than the size of an image.
        """
        for draw in self._draws:
            size = draw(size)
        return size

    def check(self, images: Iterable[Any], sizes: Iterable[Size]) -> None:
        """Compare drawn sizes and random numbers with those of real images.

        Args:
            images: images from the mapper, loaded one after another.
            sizes: sizes of the files.

        Raises:
            UnknownDraws: they differ.
        """
        start = RandomState()
        loaded = [(size_of(image), _next_numbers()) for image in images]
        start.restore()
        for size, expected in zip(sizes, loaded):
            if (self.draw(size), _next_numbers()) != expected:
                raise UnknownDraws(
                    "its mapper draws other random numbers than its augmentations do"
                )


def _next_numbers() -> tuple[float, ...]:
    """Numbers that the generators would draw next."""
    with unchanged_random_state():
        return np.random.random(), random.random(), torch.rand(()).item()


def _flat(augmentations: Iterable[Any]) -> list[Any]:
    if isinstance(augmentations, AugmentationList):
        augmentations = augmentations.augs
    parts = [_flat(a) if isinstance(a, AugmentationList) else [a] for a in augmentations]
    return [augmentation for part in parts for augmentation in part]


def _draw(augmentation: Any, size: Size) -> Size:
    try:
        transform = augmentation.get_transform(SimpleNamespace(shape=(*size, 3)))
    except (AttributeError, TypeError) as e:
        name = type(augmentation).__name__
        raise UnknownDraws(f"{name} needs more than the size of an image ({e})") from e
    return _size_after(transform, size)


def _draw_shortest_edge(augmentation: ResizeShortestEdge, size: Size) -> Size:
    edges = augmentation.short_edge_length
    if augmentation.is_range:
        edge = np.random.randint(edges[0], edges[1] + 1)
    else:
        edge = edges[np.random.randint(len(edges))]  # as np.random.choice draws
    return augmentation.get_output_shape(*size, edge, augmentation.max_size) if edge else size


def _draw_flip(augmentation: RandomFlip, size: Size) -> Size:
    np.random.random()
    return size


# Faster versions of what Detectron2's configs use, as most of a certificate's time goes here.
_DRAWS = {ResizeShortestEdge: _draw_shortest_edge, RandomFlip: _draw_flip}


def _size_after(transform: Transform, size: Size) -> Size:
    height, width = size
    if isinstance(transform, _SAME_SIZE):
        return size
    if isinstance(transform, ResizeTransform):
        return transform.new_h, transform.new_w
    if isinstance(transform, CropTransform):
        return min(transform.h, height - transform.y0), min(transform.w, width - transform.x0)
    if isinstance(transform, PadTransform):
        return height + transform.y0 + transform.y1, width + transform.x0 + transform.x1
    if isinstance(transform, TransformList):
        for part in transform.transforms:
            size = _size_after(part, size)
        return size
    raise UnknownDraws(
        f"the effect of {type(transform).__name__} on the size of an image is not known"
    )
