# Copyright (c) the d2_memfit developers.
"""Resizing of an image and its annotations."""

from typing import Any

import torch
from detectron2.structures import (
    BitMasks,
    Boxes,
    Instances,
    Keypoints,
    PolygonMasks,
    RotatedBoxes,
)
from torch.nn import functional as F

__all__ = ["resize_image", "resize_to"]


def resize_image(image: dict[str, Any], factor: float) -> dict[str, Any]:
    """Resize a dataset dict by ``factor``, and to at least 1 pixel, as :func:`resize_to` does."""
    height, width = (max(1, round(side * factor)) for side in image["image"].shape[-2:])
    return resize_to(image, (height, width))


def resize_to(image: dict[str, Any], size: tuple[int, int]) -> dict[str, Any]:
    """Resize a dataset dict, as made by Detectron2's mappers.

    Args:
        image: with "image", a tensor (C, H, W). "instances", "proposals" and "sem_seg" (H, W) are
            resized with it; "height" and "width", the size in the file, stay.
        size: new height and width of "image".

    Returns:
        dict: a new one. The given one does not change.
    """
    resized = {**image, "image": _resize_pixels(image["image"], size, "bilinear")}
    for key in ("instances", "proposals"):
        if key in image:
            resized[key] = _resize_instances(image[key], size)
    if "sem_seg" in image:
        resized["sem_seg"] = _resize_pixels(image["sem_seg"], size, "nearest")
    return resized


def _resize_pixels(pixels: torch.Tensor, size: tuple[int, int], mode: str) -> torch.Tensor:
    """Resize pixels and keep their dtype. Any dimensions may precede height and width."""
    if pixels.numel() == 0:  # an image without objects has empty masks
        return pixels.new_zeros((*pixels.shape[:-2], *size))
    shape = (1, -1, *pixels.shape[-2:])
    options = {"align_corners": False, "antialias": True} if mode == "bilinear" else {}
    result = F.interpolate(pixels.reshape(shape).float(), size=size, mode=mode, **options)
    if not pixels.dtype.is_floating_point and mode == "bilinear":
        result = result.round()
    return result.reshape(*pixels.shape[:-2], *size).to(pixels.dtype)


def _resize_instances(instances: Instances, size: tuple[int, int]) -> Instances:
    height, width = instances.image_size
    scale = (size[1] / width, size[0] / height)
    fields = {name: _resize_field(f, *scale, size) for name, f in instances.get_fields().items()}
    for name, field in fields.items():  # masks without a class of their own, as Mask2Former's
        if isinstance(field, torch.Tensor) and field.shape[-2:] == (height, width):
            fields[name] = _resize_pixels(field, size, "nearest")
    return Instances(size, **fields)


def _resize_field(field: Any, scale_x: float, scale_y: float, size: tuple[int, int]) -> Any:
    if isinstance(field, (Boxes, RotatedBoxes)):
        field = field.clone()
        field.scale(scale_x, scale_y)
        return field
    if isinstance(field, Keypoints):
        tensor = field.tensor.clone()  # (N, K, 3): x, y, visibility
        tensor[..., 0] *= scale_x
        tensor[..., 1] *= scale_y
        return Keypoints(tensor)
    if isinstance(field, PolygonMasks):
        xy = (scale_x, scale_y)
        return PolygonMasks(
            [[(p.reshape(-1, 2) * xy).reshape(-1) for p in polygons] for polygons in field.polygons]
        )
    if isinstance(field, BitMasks):
        return BitMasks(_resize_pixels(field.tensor, size, "nearest"))
    return field  # classes, scores: nothing with pixels
