# Copyright (c) the d2_memfit developers.
"""The largest batches of a job, for its dry run, as the user gives them."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import torch
from detectron2.structures import BitMasks, Instances

from ..errors import ConfigError

__all__ = [
    "GivenBatches",
    "copy_of",
    "is_image",
    "mask_bytes_per_object",
    "need_of",
    "objects_in",
    "objects_per_image",
    "padded_area",
    "size_of",
    "tensors_of",
    "with_objects",
]

_LARGE_BYTES = 2**20  # larger tensors are not read by value in a dry run
_TARGETS = ("instances", "labels", "class_labels", "boxes")  # fields of an image's objects
_PIXELS = (torch.uint8, torch.float32, torch.float16)  # others are labels, masks among them


class GivenBatches:
    """Batches from images that the user gives.

    Args:
        batch: a list with one item per image, a tuple of such lists or of tensors with one row per
            image, or a function that makes one of them. A larger micro-batch repeats the items.

    Attributes and methods are those of :class:`~.mapped.MappedBatches`. ``num_instances`` is None
    if the images have no field of objects.
    """

    assumptions: tuple[str, ...] = ()
    evaluation_assumptions: tuple[str, ...] = ()
    at_least: tuple[str, ...] = ()
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
    """A copy with its own tensors. Values of large images are zeros."""
    large = [t for t in tensors_of(data) if t.nbytes >= _LARGE_BYTES]
    copies = {id(t): torch.zeros_like(t) for t in large if is_image(t)}
    copies |= {id(t): _copied(t) for t in large if t.dtype is torch.bool}
    return copy.deepcopy(data, copies)


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


def objects_per_image(batch: Any) -> list[int]:
    """Numbers of objects of a batch's images; none if one has no objects as ``Instances``."""
    images = batch if isinstance(batch, list) else []
    found = [image.get("instances") if isinstance(image, dict) else None for image in images]
    if not all(isinstance(instances, Instances) for instances in found):
        return []
    numbers = [objects_in(image) or 0 for image in images]
    return numbers if all(numbers) else []


def with_objects(batch: list[dict[str, Any]], num: int) -> list[dict[str, Any]]:
    """A batch with ``num`` objects in each image: its own are repeated, or the last are left out.

    Repeated masks have one pixel, so that they take little RAM.

    Args:
        batch: with objects, as :func:`objects_per_image` tells.
    """
    return [{**image, "instances": _with_objects(image["instances"], num)} for image in batch]


def _with_objects(instances: Instances, num: int) -> Instances:
    fields = {name: _repeated(value, num) for name, value in instances.get_fields().items()}
    return Instances(instances.image_size, **fields)


def _repeated(field: Any, num: int) -> Any:
    """A field of ``Instances`` for ``num`` objects."""
    if isinstance(field, BitMasks):
        return BitMasks(_repeated(field.tensor, num))
    if isinstance(field, torch.Tensor) and field.dim() > 2:  # masks
        masks = field.new_zeros(num, *field.shape[1:])
        masks[: len(field)] = field[:num]
        masks[len(field) :, 0, 0] = 1
        return masks
    index = [i % len(field) for i in range(num)]
    return [field[i] for i in index] if isinstance(field, list) else field[torch.tensor(index)]


def mask_bytes_per_object(batch: list[dict[str, Any]]) -> int:
    """Bytes of the masks of one object in each image, if they are tensors."""
    tensors = [t for image in batch for t in tensors_of(image["instances"]) if t.dim() > 2]
    return sum(t[0].nbytes for t in tensors)


def is_image(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds pixels or other measurements, whose values do not matter."""
    return tensor.dtype in _PIXELS


def _copied(masks: torch.Tensor) -> torch.Tensor:
    """Copy masks. Rows without an object are never written to, so they take no RAM."""
    rows = masks.flatten(0, -2)
    there = rows.any(dim=-1)
    result = torch.zeros_like(rows)
    result[there] = rows[there]
    return result.view(masks.shape)


def tensors_of(data: Any) -> list[torch.Tensor]:
    """All tensors in containers of any kind: dicts, lists, ``Instances``, boxes, masks."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[id(value)] = value
        if isinstance(value, (str, bytes, int, float, type, torch.Tensor)) or id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Instances):
            value = value.get_fields()
        if isinstance(value, dict):
            children = list(value.values())
        elif isinstance(value, (list, tuple, set)):
            children = list(value)
        else:
            children = list(getattr(value, "__dict__", {}).values())
        for child in children:
            visit(child)

    visit(data)
    return list(found.values())


def size_of(data: Any) -> tuple[int, int]:
    """Height and width, in pixels, to which a batch's images are padded; 0 if there are none."""
    if isinstance(data, dict):
        shape = tuple(getattr(data.get("image"), "shape", ()))
        return (shape[-2], shape[-1]) if len(shape) > 1 else (0, 0)
    if isinstance(data, (list, tuple)):
        sizes = [size_of(item) for item in data]
        return max((s[0] for s in sizes), default=0), max((s[1] for s in sizes), default=0)
    shape = tuple(getattr(data, "shape", ()))
    return (shape[-2], shape[-1]) if len(shape) > 2 else (0, 0)


def padded_area(size: tuple[int, int]) -> int:
    return math.prod(-(-length // 32) * 32 for length in size)


def need_of(data: Any) -> tuple[int, int]:
    """A key that is larger for an image that needs more: its padded area, and then its bytes."""
    return padded_area(size_of(data)), sum(t.nbytes for t in tensors_of(data))
