# Copyright (c) the d2_memfit developers.
"""Batches that a user gives, and what holds for any batch: sizes, objects, copies, resizing."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import torch
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints, PolygonMasks, RotatedBoxes
from torch.nn import functional as F

from ..common.errors import ConfigError

__all__ = ["GivenBatches", "copy_of", "is_image", "objects_in", "padded_area", "resize_image"]
__all__ += ["resize_to", "size_of", "tensors_of", "with_objects"]

_LARGE_BYTES = 2**20
_TARGETS = ("instances", "labels", "class_labels", "boxes")  # fields of an image's objects
_PIXELS = (torch.uint8, torch.float32, torch.float16)  # others are labels, masks among them


class GivenBatches:
    """Batches from images that the user gives.

    Args:
        batch: a list with one item per image, a tuple of such lists or of tensors with one row per
            image, or a function that makes one of them. A larger micro-batch repeats the items.

    Attributes and methods are those of :class:`~.worst_batch.MappedBatches`. ``num_instances`` is
    None if the images have no field of objects.
    """

    assumptions: tuple[str, ...] = ()
    evaluation_assumptions = at_least = assumptions
    is_guess = has_any_shape = False
    typical = None

    def __init__(self, batch: Union[Any, Callable[[], Any]]) -> None:
        self._batch = batch() if callable(batch) else batch
        lists = self._batch if isinstance(self._batch, tuple) else (self._batch,)
        for images in lists:
            is_column = isinstance(images, torch.Tensor) and isinstance(self._batch, tuple)
            is_list = isinstance(images, Sequence) and not isinstance(images, str)
            if not (is_list or (is_column and images.dim())) or not len(images):
                raise ConfigError(
                    "batch must be a list with an item for each image, or a tuple of such lists or "
                    f"tensors, got {type(images).__name__}"
                )
        nums = [objects_in(image) for images in lists for image in images]
        self.num_instances = max((num for num in nums if num is not None), default=None)

    def training(self, num_images: int, crosses_batches: bool = False) -> Any:
        if isinstance(self._batch, tuple):
            make = getattr(type(self._batch), "_make", tuple)  # of a named tuple
            return make(_take(images, num_images) for images in self._batch)
        return _take(self._batch, num_images)

    def evaluation(self) -> Any:
        batch = self.training(1)
        for image in batch if isinstance(batch, list) else ():
            if isinstance(image, dict):
                image.pop("instances", None)
        return batch


def _take(images: Union[Sequence[Any], torch.Tensor], num: int) -> Any:
    indices = [i % len(images) for i in range(num)]
    if isinstance(images, torch.Tensor):
        return copy_of(images[indices])
    return [copy_of(images[i]) for i in indices]


def copy_of(data: Any) -> Any:
    """A copy with its own tensors. Large ones are whole, even if they are views of a batch."""
    large = [t for t in tensors_of(data) if t.nbytes >= _LARGE_BYTES]
    return copy.deepcopy(data, {id(t): t.clone() for t in large})


def objects_in(image: Any) -> Optional[int]:
    """Number of annotated objects of an image: its instances, or targets of another kind.

    None if it has no field for them.
    """
    fields = [name for name in _TARGETS if isinstance(image, dict) and name in image]
    if not fields:
        return None
    target = image[fields[0]]
    if isinstance(target, Instances) and not target.get_fields():
        return 0  # without fields they have no length
    return len(target) if hasattr(target, "__len__") else 0


def with_objects(image: dict[str, Any], num: int) -> dict[str, Any]:
    """An image with ``num`` objects: its own are repeated, or the last are left out."""
    instances: Instances = image["instances"]
    fields: dict[str, Any] = {}
    index = [i % len(instances) for i in range(num)]
    for name, field in instances.get_fields().items():
        is_list = isinstance(field, list)
        fields[name] = [field[i] for i in index] if is_list else field[torch.tensor(index)]
    return {**image, "instances": Instances(instances.image_size, **fields)}


def is_image(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds pixels or other measurements, whose values do not matter."""
    return tensor.dtype in _PIXELS


def tensors_of(data: Any) -> list[torch.Tensor]:
    """All tensors in containers of any kind: dicts, lists, ``Instances``, boxes, masks."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    waiting = [data]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        elif id(value) not in seen and not isinstance(value, (str, bytes, int, float, type)):
            seen.add(id(value))
            is_list = isinstance(value, (list, tuple, set))
            fields = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            waiting += value if is_list else fields.values()
    return list(found.values())


def size_of(data: Any) -> tuple[int, int]:
    """Height and width, in pixels, to which a batch's images are padded; 0 if there are none."""
    if isinstance(data, (list, tuple)):
        sizes = [size_of(item) for item in data]
        return max((s[0] for s in sizes), default=0), max((s[1] for s in sizes), default=0)
    image, least = (data.get("image"), 2) if isinstance(data, dict) else (data, 3)
    shape = tuple(getattr(image, "shape", ()))
    return (shape[-2], shape[-1]) if len(shape) >= least else (0, 0)


def padded_area(size: tuple[int, int]) -> int:
    return math.prod(-(-length // 32) * 32 for length in size)


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
    for key in {"instances", "proposals"} & image.keys():
        own = image[key]
        fields = {k: _resize_field(f, own.image_size, size) for k, f in own.get_fields().items()}
        resized[key] = Instances(size, **fields)
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


def _resize_field(field: Any, before: tuple[int, int], size: tuple[int, int]) -> Any:
    xy = size[1] / before[1], size[0] / before[0]  # scales
    if isinstance(field, (Boxes, RotatedBoxes)):
        field = field.clone()
        field.scale(*xy)
        return field
    if isinstance(field, Keypoints):
        # (N, K, 3): x, y, visibility
        return Keypoints(field.tensor * field.tensor.new_tensor([*xy, 1]))
    if isinstance(field, PolygonMasks):
        return PolygonMasks(
            [[(p.reshape(-1, 2) * xy).reshape(-1) for p in polygons] for polygons in field.polygons]
        )
    if isinstance(field, BitMasks):
        return BitMasks(_resize_pixels(field.tensor, size, "nearest"))
    # Masks without a class of their own, as Mask2Former's.
    if isinstance(field, torch.Tensor) and field.shape[-2:] == tuple(before):
        return _resize_pixels(field, size, "nearest")
    return field  # classes, scores: nothing with pixels
