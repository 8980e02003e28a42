# Copyright (c) the d2_memfit developers.
"""Masks of objects as packed bits: an eighth of a byte a pixel, where models have one to four."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import wraps
from inspect import signature, unwrap
from types import FunctionType
from typing import Any, Optional
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from detectron2.structures import BitMasks, Instances
from detectron2.utils.logger import log_first_n
from torch import nn
from torch.overrides import TorchFunctionMode

from ..common.compat import make_wrapper, schema, tree_map, without_torch_function
from ..common.patching import Group, files_of_classes, replaced_functions, source_files
from .technique import Technique, wrap_method

__all__ = ["MaskBits", "PackedMasks", "pack_masks"]

aten = torch.ops.aten
_zeros = torch.zeros  # a dry run replaces the function
_PART_BYTES = 2**22  # of numbers at a time: more need more memory, fewer need more calls
_POINTS_BYTES = 2**25  # the same for points, which a criterion asks for in each of its layers
_BYTES_OF_POINT = 96  # coordinates, indices and weights of a sampled point
_GATHER = 0x0102040810204080  # times 8 bytes that are 0 or 1: their bits are in the highest byte
_COPIES = {aten._to_copy, aten.clone}
_SAME = {aten.detach, aten.alias}
_OF_ONE_DIM = {
    *(aten.select.int, aten.slice.Tensor, aten.unbind.int),
    *(aten.unsqueeze.default, aten.squeeze.dim),
}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default}
_JOINS = {aten.cat.default, aten.stack.default}
# Functions that copy masks into zeros of a padded size: Mask2Former's, DETR's, the transformers'.
_PADDING = ("prepare_targets", "nested_tensor_from_tensor_list", "_pad_images_to_max_in_batch")
_padding: WeakKeyDictionary[nn.Module, list[Group]] = WeakKeyDictionary()


class PackedMasks(Technique):
    """Keeps the bit masks of objects as bits, which proposals and queries share without copies.

    Saves the masks of all objects as numbers, and copies of them. Mask2Former has 10 GB of them for
    2,000 objects at 800 x 1333 pixels. Mask R-CNN with INPUT.MASK_FORMAT "bitmask" copies a mask of
    image size for each sampled proposal, 550 MB. Points and crops come from the bits. Costs
    nothing.

    Source: github.com/facebookresearch/detectron2/issues/1912; Cheng et al., "Masked-attention Mask
    Transformer", arXiv:2112.01527, whose losses need a few points of each mask.

    Key: Whether objects' masks are kept as bits during a forward, an eighth of a byte a pixel.
    """

    key, off = "MEMFIT.MASKS.PACKED", False

    def suggest(self, job: Any, model: nn.Module) -> Optional[bool]:
        batch = job.training_batch(1)  # what masks it has does not follow from the model
        columns = batch if isinstance(batch, tuple) else (batch,)
        names = getattr(batch, "_fields", [""] * len(columns))
        packed = (with_packed_masks(list(c), name) for name, c in zip(names, columns))
        return any(map(_has_bits, packed)) or None

    def apply(self, model: nn.Module, value: bool) -> nn.Module:
        wrap_method(model, "forward", _forward_with_packed_masks)
        return model


class MaskBits(torch.Tensor):
    """Masks [*leading, height, width] that are stored as bits.

    Selections, joins, padding at the right and bottom, and other formats share the bits. Points
    (``F.grid_sample``) and crops (``roi_align``) are computed from a few masks at a time, with
    equal results to the last bit. All other operators get the complete tensor, and the log says so.

    Args:
        blocks: bits [N, lines, bytes of a line], uint8, of masks that are as large or smaller.
        rows: number of each mask [*leading], counted through the blocks; -1 is a mask of zeros.
        size: height and width.
        is_canvas: whether masks may be copied into the tensor, and into views of it.
    """

    __torch_function__: Any = without_torch_function
    blocks: list[torch.Tensor]
    rows: torch.Tensor
    is_canvas: bool

    @staticmethod
    def __new__(
        cls,
        blocks: list[torch.Tensor],
        rows: torch.Tensor,
        size: Sequence[int],
        dtype: torch.dtype,
        is_canvas: bool = False,
    ) -> "MaskBits":
        made = make_wrapper(cls, (*rows.shape, *size), dtype=dtype, device=rows.device)
        made.blocks, made.rows, made.is_canvas = blocks, rows, is_canvas
        return made

    def with_rows(self, rows: torch.Tensor, size: Sequence[int] = ()) -> "MaskBits":
        """Other rows of the same blocks."""
        return MaskBits(self.blocks, rows, size or self.shape[-2:], self.dtype, self.is_canvas)

    def unpacked(self) -> torch.Tensor:
        """The complete tensor."""
        masks = torch.zeros(
            self.rows.numel(), *self.shape[-2:], dtype=self.dtype, device=self.device
        )
        for positions, block, rows in self.by_block():
            found = _pixels(block[rows])[:, : masks.shape[1], : masks.shape[2]]
            masks[positions, : found.shape[1], : found.shape[2]] = found.to(self.dtype)
        return masks.view(self.shape)

    def by_block(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Each block, with positions of its masks in the flat tensor, and their rows in it."""
        first = 0
        for block in self.blocks:
            rows = self.rows.flatten() - first
            positions = ((rows >= 0) & (rows < len(block))).nonzero()[:, 0]
            if len(positions):
                yield positions, block, rows[positions]
            first += len(block)

    def sampled(self, grid: torch.Tensor, nearest: bool) -> torch.Tensor:
        """Values at points, as ``F.grid_sample`` computes them, with zeros outside.

        Args:
            grid: x and y from -1 to 1 of each mask's points [N, P, 2].
            nearest: the value of the nearest pixel, not of the four next to the point.

        Returns:
            [N, P]
        """
        height, width = self.shape[-2:]
        values = grid.new_zeros(grid.shape[:2])
        # As in a matcher. A dry run takes all() for true.
        are_same = len(grid) > 1 and bool((grid == grid[:1]).all())

        def pixels_at(points: torch.Tensor, block: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x, y = points.unbind(-1)
            lines, of_line = _next_to(y, height, block.shape[1], nearest)
            columns, of_column = _next_to(x, width, 8 * block.shape[2], nearest)
            at = lines[:, None] * block.shape[2] + (columns >> 3)
            return at, (columns & 7).to(torch.uint8), of_line[:, None] * of_column

        for positions, block, rows in self.by_block():
            shared = pixels_at(grid[:1], block) if are_same else None
            for part in parts_of_points(len(rows), grid.shape[1]):
                at, bit, shares = shared or pixels_at(grid[positions[part]], block)
                bits = torch.take(block, rows[part, None] * block[0].numel() + at)
                found = ((bits >> bit & 1) * shares).flatten(0, 1)
                values[positions[part]] = sum(found[1:], found[0])  # in this order, as it rounds
        return values

    def cropped(self, roi_align: Callable[..., torch.Tensor], rois: torch.Tensor) -> torch.Tensor:
        """Crops of boxes [R, 5], which begin with the number of a mask. Each mask is made once."""
        used, mask_of_roi = rois[:, 0].long().unique(return_inverse=True)
        order = mask_of_roi.argsort()
        crops = []
        for part in _parts(len(used), 8 * math.prod(self.shape[-2:])) or [slice(0, 0)]:
            here = order[(mask_of_roi[order] >= part.start) & (mask_of_roi[order] < part.stop)]
            boxes = rois[here]
            boxes[:, 0] = mask_of_roi[here] - part.start
            masks = self.with_rows(self.rows.flatten()[used[part]]).unpacked()
            crops.append(roi_align(masks[:, None], boxes))
        return torch.cat(crops)[order.argsort()]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch's hint has no func
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = _from_bits(func, args, kwargs)
        if result is not None:
            return result
        for argument, value in zip(schema(func).arguments, args):
            if isinstance(value, cls) and argument.alias_info and argument.alias_info.is_write:
                raise RuntimeError(f"{func} writes into packed masks. Set {PackedMasks.key} False")
        text = f"{PackedMasks.key}: {func} gets the complete masks. This is said once"
        log_first_n(logging.INFO, text, key="message")
        args, kwargs = tree_map(lambda x: x.unpacked() if isinstance(x, cls) else x, (args, kwargs))
        return func(*args, **kwargs)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.unpacked().numpy(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> "MaskBits":
        return self  # it cannot be written to

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.unpacked().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"MaskBits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _from_bits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Optional[Any]:
    """The result of an operator that can use the bits; None if it cannot."""
    packet, masks = func.overloadpacket, args[0]
    if func in _JOINS:
        return _joined(func, *args)
    if not isinstance(masks, MaskBits):
        return None
    rows, size = masks.rows, masks.shape[-2:]
    if packet is aten.copy_:
        return _copied(masks, args[1])
    if packet in _SAME:
        return masks.with_rows(rows)
    if packet in _COPIES:
        device, dtype = kwargs.get("device") or masks.device, kwargs.get("dtype") or masks.dtype
        blocks = [block.to(device) for block in masks.blocks]
        return MaskBits(blocks, rows.to(device, copy=True), size, dtype)
    if func in _OF_ONE_DIM:
        is_new = func is aten.unsqueeze.default
        dim = (args[1] if len(args) > 1 else 0) % (masks.dim() + is_new)
        if dim < rows.dim() + is_new:
            return tree_map(masks.with_rows, func(rows, dim, *args[2:]))
        return _cut(masks, dim - rows.dim(), *args[2:]) if func is aten.slice.Tensor else None
    if func is aten.index.Tensor and sum(map(_dims_of_index, args[1])) <= rows.dim():
        return masks.with_rows(func(rows, args[1]))
    if func in _VIEWS:
        shape = func(torch.empty(masks.shape, device="meta"), args[1]).shape
        return masks.with_rows(func(rows, shape[:-2])) if shape[-2:] == size else None
    if func is aten.constant_pad_nd.default and len(args[1]) == 4 and not any(args[2:]):
        left, right, top, bottom = args[1]
        if (left, top) == (0, 0) and min(right, bottom) >= 0 and _is_complete(masks):
            return masks.with_rows(rows, (size[0] + bottom, size[1] + right))
    if packet is aten.grid_sampler_2d and masks.shape[1:2] == (1,):
        grid, mode, padding, aligned = args[1:]
        if mode < 2 and padding == 0 and not aligned and grid.dtype is torch.float32:
            values = masks.sampled(grid.flatten(1, 2), nearest=mode == 1)
            return values.view(len(values), 1, *grid.shape[1:3])
    if schema(func).name == "torchvision::roi_align" and masks.shape[1] == 1:
        return masks.cropped(lambda m, boxes: func(m, boxes, *args[2:], **kwargs), args[1])
    return None


def _cut(
    masks: MaskBits, dim: int, start: Any = None, end: Any = None, step: int = 1
) -> Optional[MaskBits]:
    """The first lines or columns of a canvas, or all of masks."""
    size = list(masks.shape[-2:])
    end = size[dim] if end is None else min(end, size[dim])
    if start or step != 1 or end < 0 or not (masks.is_canvas or end == size[dim]):
        return None
    size[dim] = end
    return masks.with_rows(masks.rows, size)


def _dims_of_index(index: Optional[torch.Tensor]) -> int:
    """Number of dimensions that an index covers; a mask covers as many as it has."""
    is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
    return index.dim() if index is not None and is_mask else 1


def _is_complete(masks: MaskBits) -> bool:
    """Whether all stored pixels are within the masks' size."""
    height, width = masks.shape[-2:]
    return all(b.shape[1] <= height and b.shape[2] <= -(-width // 8) for b in masks.blocks)


def _joined(func: Any, parts: Sequence[Any], dim: int = 0) -> Optional[MaskBits]:
    kinds = {(part.shape[-2:], part.dtype) for part in parts if isinstance(part, MaskBits)}
    if len(kinds) != 1 or not all(isinstance(part, MaskBits) for part in parts):
        return None
    if not 0 <= dim < parts[0].rows.dim() + (func is aten.stack.default):
        return None
    blocks: list[torch.Tensor] = []
    rows = func([_moved(part, blocks) for part in parts], dim)
    return MaskBits(blocks, rows, parts[0].shape[-2:], parts[0].dtype)


def _moved(masks: MaskBits, blocks: list[torch.Tensor]) -> torch.Tensor:
    """Add the blocks of masks to others; return the masks' rows among all of them."""
    start = sum(map(len, blocks))
    blocks.extend(masks.blocks)
    return torch.where(masks.rows < 0, masks.rows, masks.rows + start)


def _copied(canvas: MaskBits, source: Any) -> Optional[MaskBits]:
    """``canvas.copy_(source)``."""
    source = pack_masks(source) if type(source) is torch.Tensor and source.dim() == 3 else source
    if not isinstance(source, MaskBits) or not canvas.is_canvas or canvas.shape != source.shape:
        return None
    if not _is_complete(source):
        return None
    canvas.rows.copy_(_moved(source, canvas.blocks))
    return canvas


def _parts(num: int, num_bytes: int, most: int = _PART_BYTES) -> list[slice]:
    """Parts of a number of masks, of about ``most`` bytes each."""
    step = max(1, most // max(1, num_bytes))
    return [slice(i, min(i + step, num)) for i in range(0, num, step)]


def parts_of_points(num_masks: int, num_points: int) -> list[slice]:
    """Parts of masks that are sampled at once. A dry run takes the first: all need the same."""
    return _parts(num_masks, num_points * _BYTES_OF_POINT, _POINTS_BYTES)


def _next_to(
    places: torch.Tensor, length: int, stored: int, nearest: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pixels next to places, and their shares: numbers and weights [1 or 2, *places.shape].

    Args:
        places: from -1 to 1.
        length: number of pixels from -1 to 1.
        stored: how many of them are stored; the others are 0.
    """
    # Rounded once, as in PyTorch's kernels, whose product and difference are one operation.
    at = ((places + 1).double() * (length / 2) - 0.5).to(places.dtype)
    first = at.round() if nearest else at.floor()
    rest = at - first
    found, shares = torch.stack([first, first + 1]), torch.stack([1 - rest, rest])
    if nearest:
        found, shares = first[None], torch.ones_like(rest)[None]
    last = min(stored, length) - 1
    return found.clamp(0, last).int(), shares * ((found >= 0) & (found <= last))


def _pixels(bits: torch.Tensor) -> torch.Tensor:
    """Masks [N, lines, 8 times the bytes of a line], bool."""
    digits = torch.arange(256, device=bits.device)[:, None] >> torch.arange(8, device=bits.device)
    pixels_of_byte = (digits & 1).to(torch.uint8).view(torch.int64)[:, 0]  # 8 of them in a number
    return pixels_of_byte[bits.int()].view(torch.bool)


def pack_masks(masks: torch.Tensor) -> torch.Tensor:
    """Masks [N, height, width] as bits; those of other numbers than 0 and 1 stay as they are."""
    num, height, width = masks.shape
    bits = masks.new_empty(num, height, -(-width // 8), dtype=torch.uint8)
    for part in _parts(num, 8 * height * width):
        binary = masks[part].bool()
        if masks.dtype is not torch.bool and not torch.equal(masks[part] == 1, binary):
            return masks
        padded = F.pad(binary, (0, -width % 8)).contiguous()
        bits[part] = (padded.view(torch.int64) * _GATHER).view(torch.uint8)[..., 7::8]
    return MaskBits([bits], torch.arange(num, device=bits.device), (height, width), masks.dtype)


def with_packed_masks(value: Any, name: str = "") -> Any:
    """The same batch of Detectron2, or targets of a criterion, whose masks are packed.

    Masks are the ``gt_masks`` of instances, and the tensors [N, height, width] in a list, whose
    name has "mask" in it. Others stay as they are: of other numbers than 0 and 1, or of a project's
    own class.
    """
    if type(value) in (list, tuple):
        return type(value)(_with_bits(v, name) for v in value)
    return value


def _with_bits(value: Any, name: str) -> Any:
    is_mask = type(value) is torch.Tensor and value.dim() == 3 and "mask" in name
    if is_mask and not value.requires_grad:
        return pack_masks(value)
    if type(value) is dict:
        return {k: _with_bits(v, k) for k, v in value.items()}
    if type(value) is Instances and value.has("gt_masks"):
        masks = _with_bits(value.gt_masks, "gt_masks")
        return Instances(value.image_size, **{**value.get_fields(), "gt_masks": masks})
    return BitMasks(_with_bits(value.tensor, name)) if type(value) is BitMasks else value


def _forward_with_packed_masks(
    model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if not model.training:
        return forward(*args, **kwargs)
    bound = signature(type(model).forward).bind(model, *args, **kwargs)
    for name, value in bound.arguments.items():
        bound.arguments[name] = with_packed_masks(value, name)
    with replaced_functions(*_padding_functions(model)):
        return forward(*bound.args[1:], **bound.kwargs)


def _padding_functions(model: nn.Module) -> list[Group]:
    """What pads masks, in the files and classes of a model, for :func:`replaced_functions`."""
    if model not in _padding:
        modules = list(model.modules())
        files = source_files(modules)
        # Models of the transformers library make their criterion in a function.
        losses: list[Any] = [m.loss_function for m in modules if getattr(m, "loss_type", None)]
        files += files_of_classes(map(unwrap, losses))
        named = [value for file in files for value in vars(file).values()]
        bases = {b for kind in named if isinstance(kind, type) for b in kind.__mro__}
        places = [*bases, *files_of_classes(b for b in bases if issubclass(b, nn.Module))]
        known = {
            n: [p for p in places if isinstance(vars(p).get(n), FunctionType)] for n in _PADDING
        }
        _padding[model] = [(found, {name: _sharing}) for name, found in known.items() if found]
    return _padding[model]


def _sharing(pad: Callable[..., Any]) -> Callable[..., Any]:
    """A function that pads masks by a copy into zeros, so that the result shares their bits."""

    @wraps(pad)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _ZerosAsCanvas() if _has_bits((args, kwargs)) else nullcontext():
            return pad(*args, **kwargs)

    return run


def _has_bits(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_bits, value))
    if isinstance(value, (dict, Instances)):
        fields = value if isinstance(value, dict) else value.get_fields()
        return any(map(_has_bits, fields.values()))
    return isinstance(getattr(value, "tensor", value), MaskBits)


class _ZerosAsCanvas(TorchFunctionMode):
    """While open, ``torch.zeros`` of three or more dimensions returns masks for copies into it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        shape = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
        if func is not _zeros or len(shape) < 3:
            return func(*args, **kwargs)
        rows = torch.full(tuple(shape[:-2]), -1, device=kwargs.get("device"))
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return MaskBits([], rows, shape[-2:], dtype, is_canvas=True)
