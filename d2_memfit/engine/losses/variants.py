# Copyright (c) the d2_memfit developers.
"""Images of a job, varied for the test of its losses: fewer objects, none, another size."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from detectron2.structures import Instances
from torch import nn

from ...job import resize_image, size_of
from ..window import Row, count_objects

__all__ = ["images_of_one_size", "images_of_two_sizes", "shrunk"]

_IGNORED = ("ignore_value", "ignore_index", "ignore_label")  # attributes of heads and criteria
_DETECTRON2S = 255
_NOT_LABELS = ("image", "pixel_values", "pixel_mask", "proposals")  # fields of an image
_LEAST_SIDE = 32  # pixels
_OTHER_SIZE = 0.7  # of height and width, where a window has images of one size


def images_of_one_size(
    images: Sequence[Any], model: nn.Module, number: int = 3, with_empty: bool = True
) -> list[Any]:
    """Images of one size: the most crowded one, one with a third of its labels, one without any.

    The pixels are those of different images of the window, as far as there are any.

    Args:
        model: its heads say which label of a pixel is ignored.
        with_empty: whether the third one has no labels.
    """
    crowded = max(images, key=count_objects)
    others = [i for i in images if i is not crowded] or [crowded]
    others.sort(key=lambda i: (_size(i) != _size(crowded), -count_objects(i)))
    chosen = [crowded]
    for n in range(1, number):
        other = others[(n - 1) % len(others)]
        is_like = _size(other) == _size(crowded) and n <= len(others) and other is not crowded
        chosen.append(other if is_like else _with_pixels_of(crowded, other, n))
    objects = count_objects(crowded)
    shares = [0.3, 0.0 if with_empty else 0.6, 0.8]
    for n, share in zip(range(1, number), shares):
        least = 1 if share else 0
        chosen[n] = _labelled(chosen[n], max(round(objects * share), least), share, model)
    return chosen


def images_of_two_sizes(images: Sequence[Any]) -> list[Any]:
    """Two images of different size, with objects; none if they cannot be resized."""
    crowded = max(images, key=count_objects)
    for other in sorted(images, key=count_objects, reverse=True):
        if _size(other) != _size(crowded):
            return [crowded, other]
    other = next((image for image in images if image is not crowded), crowded)
    can_be_resized = isinstance(other, dict) and min(_size(other)) > 1
    return [crowded, resize_image(other, _OTHER_SIZE)] if can_be_resized else []


def shrunk(images: Sequence[Any], most_pixels: float) -> list[Any]:
    """The images, smaller if the largest has more pixels; others than dataset dicts as given.

    Their shorter side keeps 32 pixels.
    """
    height, width = size_of(list(images))
    least = _LEAST_SIDE / max(min(height, width), 1)
    factor = max(math.sqrt(most_pixels / max(height * width, 1)), least)
    if factor >= 1 or not all(isinstance(i, dict) and min(_size(i)) > 1 for i in images):
        return list(images)
    return [resize_image(image, factor) for image in images]


def _size(image: Any) -> tuple[int, int]:
    return size_of(list(image.parts) if isinstance(image, Row) else image)


def _with_pixels_of(image: Any, other: Any, number: int) -> Any:
    """The image and its labels, with the pixels of another one, flipped and dark or inverted."""
    pixels = image.get("image") if isinstance(image, dict) else None
    others = other.get("image") if isinstance(other, dict) else None
    if not (isinstance(pixels, torch.Tensor) and isinstance(others, torch.Tensor)):
        return other if image is not other else image
    if pixels.dim() != 3 or others.dim() != 3 or len(pixels) != len(others):
        return image
    resized = F.interpolate(others[None].float(), size=pixels.shape[-2:])[0].flip(-1)
    changed = resized / 4 if number % 2 else resized.max() - resized
    return {**image, "image": changed.to(pixels.dtype)}


def _labelled(image: Any, objects: int, share: float, model: nn.Module) -> Any:
    """The image with fewer objects, and with labels on a share of its pixels' rows."""
    return _cut(image, count_objects(image), objects, share, _size(image), _ignored_by(model))


def _cut(value: Any, old: int, new: int, share: float, size: tuple[int, int], ignored: int) -> Any:
    def cut(part: Any) -> Any:
        return _cut(part, old, new, share, size, ignored)

    if isinstance(value, Row):
        # A tensor is an image or a label image, and not one entry for each object.
        parts = (
            _cut(p, 0, new, share, size, ignored) if _is_tensor(p) else cut(p) for p in value.parts
        )
        return replace(value, parts=tuple(parts))
    if isinstance(value, dict):
        return {k: v if k in _NOT_LABELS else cut(v) for k, v in value.items()}
    if isinstance(value, Instances):
        return value[:new] if value.get_fields() else value
    is_tensor = _is_tensor(value)
    if is_tensor and value.dtype == torch.int64 and value.shape[-2:] == size and min(size) > 1:
        labels = value.clone()
        labels[..., round(size[0] * share) :, :] = ignored
        return labels
    if (is_tensor and value.dim() > 0) or isinstance(value, list):
        return value[:new] if old and len(value) == old else value
    return value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _ignored_by(model: nn.Module) -> int:
    found = [getattr(m, name, None) for m in model.modules() for name in _IGNORED]
    return next((value for value in found if type(value) is int), _DETECTRON2S)
