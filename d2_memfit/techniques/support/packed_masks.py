# Copyright (c) the d2_memfit developers.
"""Masks of objects that are stored as bits, and become numbers a few at a time."""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from itertools import product
from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from detectron2.structures import BitMasks, Instances
from torch.overrides import TorchFunctionMode

from ...compat.pytorch import schema
from .lazy_rows import LazyRows

__all__ = ["PackedRows", "pack_masks", "sharing_padded_masks", "with_packed_masks"]

aten = torch.ops.aten
_zeros = torch.zeros  # a dry run replaces the function
_CHUNK_BYTES = 2**22  # bytes of numbers at a time: more need more memory, fewer more calls
_BYTES_OF_POINT = 64  # numbers for a sampled point: coordinates, indices, weights
_PIXELS_OF_POINT = 32  # with fewer pixels a point, it takes less time to make numbers of a mask
_GATHER = 0x0102040810204080  # times 8 bytes that are 0 or 1: their bits are in the highest byte
_COPIES = {aten._to_copy, aten.clone, aten.detach, aten.alias}
_JOINS = {aten.cat.default, aten.stack.default}


@dataclass(frozen=True)
class _Store:
    """Masks of one size: uint8 [N, bytes of a mask]."""

    bits: torch.Tensor
    height: int
    width: int

    def masks(self, rows: torch.Tensor) -> torch.Tensor:
        """Masks [len(rows), height, width], bool."""
        device = self.bits.device
        digits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
        pixels_of_byte = digits.to(torch.uint8).view(torch.int64)[:, 0]  # 8 of them in a number
        masks = pixels_of_byte[self.bits[rows].int()].view(torch.bool)
        masks = masks[:, : self.height * self.width].contiguous()
        return masks.view(-1, self.height, self.width)

    def at(self, rows: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Pixels [len(rows), P] at columns x and lines y [len(rows), P] of the masks, uint8."""
        pixel = y * self.width + x
        place = (pixel >> 3) + (rows * self.bits.shape[1])[:, None]
        return torch.take(self.bits, place) >> (pixel & 7).to(torch.uint8) & 1


class PackedRows:
    """The rows of a tensor of masks [*leading, height, width], an eighth of a byte a pixel.

    Selections, joins, padding at the right and bottom, and other formats share the bits. Points are
    sampled from the bits. Crops and resized masks are made from a few masks at a time. All other
    operators get the complete tensor.

    Args:
        stores: the masks; their numbers count through the stores. -1 is a mask without pixels.
        like: a mask on the device "meta" [1, height, width].
        is_canvas: whether masks can be copied into the tensor, and into views of it.
    """

    key = "MEMFIT.CRITERION.CHUNK_SIZE None, and MEMFIT.HEADS.SHARED_BITMASKS False"

    def __init__(
        self,
        stores: list[_Store],
        like: torch.Tensor,
        device: torch.device,
        is_canvas: bool = False,
    ) -> None:
        self.stores, self.like, self.device, self.is_canvas = stores, like, device, is_canvas

    def tensor(self, numbers: torch.Tensor) -> LazyRows:
        """The masks of some numbers [*leading]."""
        return LazyRows(self, numbers, self.like, 2 * self.like.nbytes, self.device)

    def of_size(self, height: int, width: int) -> "PackedRows":
        """The same masks with more or fewer pixels at the right and bottom."""
        like = self.like.new_empty(1, height, width)
        return PackedRows(self.stores, like, self.device, self.is_canvas)

    def __call__(self, numbers: torch.Tensor) -> torch.Tensor:
        """Some masks [len(numbers), height, width]."""
        height, width = self.like.shape[1:]
        parts = list(self._by_store(numbers))
        if [(s.height, s.width, len(rows)) for s, _, rows in parts] == [
            (height, width, len(numbers))
        ]:
            return parts[0][0].masks(parts[0][2]).to(self.like.dtype)
        options: Any = {"dtype": self.like.dtype, "device": self.device}
        masks = torch.zeros(len(numbers), height, width, **options)
        for store, positions, rows in parts:
            found = store.masks(rows)[:, :height, :width]
            masks[positions, : found.shape[1], : found.shape[2]] = found.to(masks.dtype)
        return masks

    def _by_store(
        self, numbers: torch.Tensor
    ) -> Iterator[tuple[_Store, torch.Tensor, torch.Tensor]]:
        """Each store; positions in ``numbers`` of its masks; and these masks' rows in it."""
        first = 0
        for store in self.stores:
            rows = numbers - first
            positions = ((rows >= 0) & (rows < len(store.bits))).nonzero()[:, 0]
            if len(positions):
                yield store, positions.to(self.device), rows[positions].to(self.device)
            first += len(store.bits)

    def sample(self, numbers: torch.Tensor, grid: torch.Tensor, nearest: bool) -> torch.Tensor:
        """Values at points, as ``F.grid_sample`` computes them, with zeros outside.

        Args:
            numbers: of N masks.
            grid: x and y from -1 to 1 [N, P, 2].
            nearest: the value of the nearest pixel, not of the four next to the point.

        Returns:
            [N, P]
        """
        height, width = self.like.shape[1:]
        values = grid.new_zeros(grid.shape[:2])
        are_same = len(grid) > 1 and bool((grid == grid[:1]).all())  # as in a matcher

        def pixels_at(points: torch.Tensor, store: _Store) -> Any:
            x, y = points.unbind(-1)
            lines = _next_to(y, height, store.height, nearest)
            return list(product(lines, _next_to(x, width, store.width, nearest)))

        for store, positions, rows in self._by_store(numbers):
            shared = pixels_at(grid[:1], store) if are_same else None
            for part in _parts(len(rows), grid.shape[1] * _BYTES_OF_POINT):
                found: Any = 0
                for (line, of_line), (column, of_column) in shared or pixels_at(
                    grid[positions[part]], store
                ):
                    pixels = store.at(rows[part], column, line)
                    found = pixels * (of_line * of_column) + found
                values[positions[part]] = found
        return values

    def crop(
        self, operator: Callable[..., torch.Tensor], numbers: torch.Tensor, rois: torch.Tensor
    ) -> torch.Tensor:
        """Crops of masks, each mask made once.

        Args:
            operator: called with masks [N, 1, height, width] and boxes [R, 5], which begin with the
                number of the mask.
            numbers: of all masks.
        """
        used, mask_of_roi = numbers[rois[:, 0].long().cpu()].unique(return_inverse=True)
        order = mask_of_roi.argsort()
        crops = []
        for part in _parts(len(used), 2 * self.like.nbytes) or [slice(0, 0)]:
            is_here = (mask_of_roi[order] >= part.start) & (mask_of_roi[order] < part.stop)
            here = order[is_here]
            boxes = rois[here.to(rois.device)]
            boxes[:, 0] = mask_of_roi[here] - part.start
            crops.append(operator(self(used[part])[:, None], boxes))
        return torch.cat(crops)[order.argsort().to(self.device)]

    def operator(
        self, func: Any, masks: LazyRows, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Optional[Any]:
        """The result of an operator that can use the bits; None if it cannot."""
        packet = func.overloadpacket
        if packet is aten.copy_:
            return _copy(*args[:2])
        if func in _JOINS:
            return _join(func, *args)
        if args[0] is not masks:
            return None
        numbers, num_dims = masks.numbers, masks.dim()
        height, width = self.like.shape[1:]
        if packet in _COPIES:
            return self._copied(numbers, **kwargs)
        if func is aten.slice.Tensor and args[1] % num_dims >= numbers.dim():
            return self._cut(numbers, args[1] % num_dims - num_dims, *args[2:])
        if func is aten.constant_pad_nd.default and len(args[1]) == 4 and not any(args[2:]):
            left, right, top, bottom = args[1]
            if (left, top) == (0, 0) and min(right, bottom) >= 0:
                return self.of_size(height + bottom, width + right).tensor(numbers)
        if packet is aten.grid_sampler_2d and masks.shape[1:2] == (1,):
            return self._grid_sample(func, numbers[:, 0], *args[1:])
        if schema(func).name == "torchvision::roi_align" and masks.shape[1] == 1:
            crop = lambda m, boxes: func(m, boxes, *args[2:], **kwargs)  # noqa: E731
            return self.crop(crop, numbers.flatten(), args[1])
        return None

    def _grid_sample(
        self,
        func: Any,
        numbers: torch.Tensor,
        grid: torch.Tensor,
        mode: int,
        padding: int,
        aligned: bool,
    ) -> torch.Tensor:
        num_points = math.prod(grid.shape[1:3])
        is_usual = mode < 2 and padding == 0 and not aligned and grid.dtype is torch.float32
        if is_usual and self.like.numel() > _PIXELS_OF_POINT * num_points:
            values = self.sample(numbers, grid.flatten(1, 2), nearest=mode == 1)
            return values.view(len(values), 1, *grid.shape[1:3])
        parts = _parts(len(numbers), 2 * self.like.nbytes) or [slice(0, 0)]
        others = (mode, padding, aligned)
        return torch.cat([func(self(numbers[p])[:, None], grid[p], *others) for p in parts])

    def _copied(
        self,
        numbers: torch.Tensor,
        dtype: Optional[torch.dtype] = None,
        device: Optional[torch.device] = None,
        **_: Any,
    ) -> LazyRows:
        stores = self.stores
        if device is not None:
            stores = [_Store(s.bits.to(device), s.height, s.width) for s in stores]
        like = self.like.to(dtype or self.like.dtype)
        return PackedRows(stores, like, device or self.device, self.is_canvas).tensor(numbers)

    def _cut(
        self, numbers: torch.Tensor, dim: int, start: Any = None, end: Any = None, step: int = 1
    ) -> Optional[LazyRows]:
        """The first lines or columns of a canvas, or all of masks."""
        size = list(self.like.shape[1:])
        end = size[dim] if end is None else min(end, size[dim])
        if start or step != 1 or end < 0 or not (self.is_canvas or end == size[dim]):
            return None
        size[dim] = end
        return self.of_size(*size).tensor(numbers)


def _parts(num: int, num_bytes: int) -> list[slice]:
    """Parts of a number of rows of this size, of about the bytes of a chunk."""
    step = max(1, _CHUNK_BYTES // max(1, num_bytes))
    return [slice(i, min(i + step, num)) for i in range(0, num, step)]


def _next_to(
    places: torch.Tensor, length: int, stored: int, nearest: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The pixels next to places, and their shares: numbers and weights of the places' shape.

    Args:
        places: from -1 to 1.
        length: number of pixels from -1 to 1.
        stored: how many of them are stored; the others are 0.
    """
    # Rounded once, as in PyTorch's kernels, whose product and difference are one operation.
    at = ((places + 1).double() * (length / 2) - 0.5).to(places.dtype)
    first = at.round() if nearest else at.floor()
    rest = at - first
    found = [(first, 1 - rest), (first + 1, rest)]
    if nearest:
        found = [(first, torch.ones_like(rest))]
    return [(x.clamp(0, stored - 1).int(), w * ((x >= 0) & (x < stored))) for x, w in found]


def _is_packed(value: Any) -> bool:
    return isinstance(value, LazyRows) and isinstance(value.rows, PackedRows)


def _join(func: Any, parts: Sequence[Any], dim: int = 0) -> Optional[LazyRows]:
    kinds = {(*part.like.shape, part.dtype) for part in parts if _is_packed(part)}
    if len(kinds) != 1 or not all(map(_is_packed, parts)):
        return None
    if not 0 <= dim < parts[0].numbers.dim() + (func is aten.stack.default):
        return None
    stores: list[_Store] = []
    numbers = func([_moved(part, stores) for part in parts], dim)
    return PackedRows(stores, parts[0].like, parts[0].device).tensor(numbers)


def _moved(masks: Any, stores: list[_Store]) -> torch.Tensor:
    """Add the stores of masks to others; return the masks' numbers among all of them."""
    start = sum(len(store.bits) for store in stores)
    stores.extend(masks.rows.stores)
    return torch.where(masks.numbers < 0, masks.numbers, masks.numbers + start)


def _copy(target: Any, source: Any) -> Optional[torch.Tensor]:
    """``target.copy_(source)``, into a canvas, or from masks into numbers."""
    if not _is_packed(target):
        if target.shape != source.shape or source.numbers.dim() != 1:
            return None
        for part in _parts(len(target), 2 * source.like.nbytes):
            target[part] = source.at(torch.arange(part.start, part.stop))
        return target
    source = pack_masks(source) if type(source) is torch.Tensor and source.dim() == 3 else source
    if not _is_packed(source) or not target.rows.is_canvas or target.shape != source.shape:
        return None
    target.numbers.copy_(_moved(source, target.rows.stores))
    return target


def pack_masks(masks: torch.Tensor) -> torch.Tensor:
    """Masks [N, height, width] as bits; those of other numbers than 0 and 1 stay as they are."""
    num, height, width = masks.shape
    bits = masks.new_empty(num, (height * width + 7) // 8, dtype=torch.uint8)
    for part in _parts(num, 8 * bits.shape[1]):
        flat = masks[part].flatten(1)
        binary = flat.bool()
        if flat.dtype is not torch.bool and not torch.equal(flat == 1, binary):
            return masks
        padded = F.pad(binary, (0, -flat.shape[1] % 8)).contiguous()
        bits[part] = (padded.view(torch.int64) * _GATHER >> 56).to(torch.uint8)
    like = torch.empty(1, height, width, dtype=masks.dtype, device="meta")
    rows = PackedRows([_Store(bits, height, width)], like, masks.device)
    return rows.tensor(torch.arange(num))


def sharing_padded_masks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function, which pads masks by a copy into zeros, share the bits of packed masks."""

    @wraps(function)
    def pad(*args: Any, **kwargs: Any) -> Any:
        with _ZerosAsCanvas() if _has_packed((args, kwargs)) else nullcontext():
            return function(*args, **kwargs)

    return pad


def _has_packed(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_packed, value))
    if isinstance(value, (dict, Instances)):
        fields = value if isinstance(value, dict) else value.get_fields()
        return any(map(_has_packed, fields.values()))
    return _is_packed(getattr(value, "tensor", value))


class _ZerosAsCanvas(TorchFunctionMode):
    """While open, ``torch.zeros`` of three or more dimensions returns masks without pixels."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        shape = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
        if func is not _zeros or len(shape) < 3:
            return func(*args, **kwargs)
        like = torch.empty(1, *shape[-2:], dtype=kwargs.get("dtype"), device="meta")
        device = torch.device(kwargs.get("device") or "cpu")
        rows = PackedRows([], like, device, is_canvas=True)
        return rows.tensor(torch.full(tuple(shape[:-2]), -1))


def with_packed_masks(value: Any, name: str = "") -> Any:
    """The same batch of Detectron2, or targets of a criterion, whose masks are packed.

    Masks are the ``gt_masks`` of instances, and the tensors [N, height, width] in a list, whose
    name has "mask" in it. Others stay as they are: of other numbers than 0 and 1, or of a project's
    own class.

    Args:
        name: of the argument.
    """
    if type(value) in (list, tuple):
        return type(value)(_packed(v, name) for v in value)
    return value


def _packed(value: Any, name: str) -> Any:
    if type(value) is dict:
        return {k: _packed(v, k) for k, v in value.items()}
    if type(value) is Instances and value.has("gt_masks"):
        fields = {**value.get_fields(), "gt_masks": _packed(value.gt_masks, "gt_masks")}
        return Instances(value.image_size, **fields)
    if type(value) is BitMasks:
        return BitMasks(_packed(value.tensor, name))
    is_mask = type(value) is torch.Tensor and value.dim() == 3 and "mask" in name
    return pack_masks(value) if is_mask and not value.requires_grad else value
