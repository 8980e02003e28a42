# Copyright (c) the d2_memfit developers.
"""Tensors, such as an image's masks, of which only a few rows exist at a time."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from ...compat.pytorch import make_wrapper, schema, tree_iter, tree_map, without_torch_function

__all__ = ["LazyRows", "LazyRowsChangeError"]

aten = torch.ops.aten
_CHUNK_BYTES = 2**26  # bytes of rows computed at a time; smaller tensors are computed as a whole
_Rows = Callable[[torch.Tensor], torch.Tensor]  # row numbers [n] -> [n, *row]

_COPIES = {aten._to_copy, aten.detach, aten.alias}
_REDUCTIONS = {aten.sum, aten.mean, aten.amax, aten.amin, aten.any, aten.all, aten.argmax}
_VIEWS_OF_DIM = {aten.select.int, aten.slice.Tensor, aten.unsqueeze.default, aten.squeeze.dim}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}


class LazyRowsChangeError(RuntimeError):
    """Code writes into rows that are computed on each access."""


class _NeedsAllRows(Exception):
    """An operator does not work row by row."""


class LazyRows(torch.Tensor):
    """A tensor [*leading, *row] whose rows are computed when needed, a few at a time.

    Operators that work row by row return another one, as do views of its leading dimensions. Small
    results, such as a sum over each row, are computed at once. Others get the complete tensor.

    Args:
        rows: called with numbers of rows [n], on the CPU; returns [n, *row]. Its method
            ``operator``, if it has one, is tried first: called with an operator, the tensor, and
            the arguments, it returns a result or None. All other results of such rows are computed
            at once, so no gradient consists of rows.
        numbers: the number of each row [*leading], on the CPU.
        like: a row on the device "meta" [1, *row].
        row_bytes: bytes of the largest tensor made for a row.
        device: device of the rows.
    """

    __torch_function__: Any = without_torch_function

    @staticmethod
    def __new__(
        cls,
        rows: _Rows,
        numbers: torch.Tensor,
        like: torch.Tensor,
        row_bytes: int,
        device: torch.device,
    ) -> "LazyRows":
        shape = (*numbers.shape, *like.shape[1:])
        made = make_wrapper(cls, shape, dtype=like.dtype, device=device)
        made.rows = rows
        made.numbers = numbers
        made.like = like
        made.row_bytes = max(row_bytes, like.nbytes)
        return made

    rows: _Rows
    numbers: torch.Tensor
    like: torch.Tensor
    row_bytes: int

    def with_numbers(self, numbers: torch.Tensor) -> "LazyRows":
        """A selection or another order of the same rows."""
        return LazyRows(self.rows, numbers, self.like, self.row_bytes, self.device)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """The rows at some positions [n], counted through the leading dimensions."""
        return self.rows(self.numbers.flatten()[positions])

    def compute(self) -> torch.Tensor:
        """Compute the complete tensor."""
        num = self.numbers.numel()
        step = max(1, _CHUNK_BYTES // max(1, self.row_bytes))
        if 0 < num <= step:
            return self.at(torch.arange(num)).to(self.dtype).view(self.shape)
        result = torch.empty(num, *self.like.shape[1:], dtype=self.dtype, device=self.device)
        for start in range(0, num, step):
            end = min(start + step, num)
            result[start:end] = self.at(torch.arange(start, end))
        return result.view(self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # PyTorch's hint has no func
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        lazy = next(t for t in tree_iter((args, kwargs)) if isinstance(t, LazyRows))
        operator = getattr(lazy.rows, "operator", None)
        result = operator and operator(func, lazy, args, kwargs)
        if result is not None:
            return result
        if schema(func).is_mutable and any(isinstance(a, LazyRows) for a in _written(func, args)):
            raise LazyRowsChangeError(
                f"{func} writes into masks that are computed when they are needed. Set {lazy.key}"
            )
        try:
            return _by_rows(func, lazy, args, kwargs)
        except _NeedsAllRows:
            args, kwargs = tree_map(_computed, (args, kwargs))
            return func(*args, **kwargs)

    @property
    def key(self) -> str:
        """The config keys without which there would be no lazy rows."""
        return str(getattr(self.rows, "key", "MEMFIT.EVALUATION.ON_HOST False"))

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute().numpy(*args, **kwargs)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def tolist(self) -> Any:
        return self.compute().tolist()

    def __deepcopy__(self, memo: Any) -> "LazyRows":
        return self  # it cannot be written to

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.compute().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyRows(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype on the device "meta"."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _written(func: Any, args: Sequence[Any]) -> list[Any]:
    arguments = zip(schema(func).arguments, args)
    return [value for a, value in arguments if a.alias_info and a.alias_info.is_write]


def _computed(value: Any) -> Any:
    return value.compute() if isinstance(value, LazyRows) else value


def _by_rows(func: Any, lazy: LazyRows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator by rows; raise ``_NeedsAllRows`` if it works in another way."""
    num_leading = lazy.numbers.dim()
    num_dims = lazy.dim()
    packet = func.overloadpacket
    if packet in _COPIES or _is_elementwise(func):
        return _of_rows(lazy, func, args, kwargs)
    if args[0] is not lazy:
        raise _NeedsAllRows
    if packet in _REDUCTIONS and len(args) > 1 and args[1] is not None:
        is_one = isinstance(args[1], int)
        dims = [d % num_dims for d in ([args[1]] if is_one else args[1])]
        if not dims or min(dims) < num_leading:
            raise _NeedsAllRows
        dims = [d - num_leading + 1 for d in dims]
        return _of_rows(lazy, func, (lazy, dims[0] if is_one else dims, *args[2:]), kwargs)
    if func in _VIEWS_OF_DIM or func is aten.unbind.int:
        position = args[1] if len(args) > 1 else 0
        is_new = func is aten.unsqueeze.default
        dim = position % (num_dims + is_new)
        if dim < num_leading + is_new:
            chosen = func(lazy.numbers, dim, *args[2:])
            return tree_map(lazy.with_numbers, chosen)
        if func is not aten.unbind.int:
            return _of_rows(lazy, func, (lazy, dim - num_leading + 1, *args[2:]), kwargs)
    if func is aten.index.Tensor and sum(map(_num_indexed, args[1])) <= num_leading:
        indices = [i if i is None else i.cpu() for i in args[1]]
        return lazy.with_numbers(func(lazy.numbers, indices))
    if func is aten.expand.default or func in _VIEWS:
        return _in_shape(lazy, func, list(args[1]))
    raise _NeedsAllRows


def _is_elementwise(func: Any) -> bool:
    """Whether an operator's result for a row depends only on this row, and is always the same."""
    others = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output}
    return torch.Tag.pointwise in func.tags and others.isdisjoint(func.tags)


def _num_indexed(index: Optional[torch.Tensor]) -> int:
    """Number of dimensions that an index covers; a mask covers as many as it has."""
    is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
    return index.dim() if index is not None and is_mask else 1


def _in_shape(lazy: LazyRows, func: Any, sizes: list[int]) -> Any:
    """A view that changes only the leading dimensions, or only the others."""
    row = lazy.like.shape[1:]
    if func in _VIEWS and -1 in sizes:
        known = math.prod(s for s in sizes if s != -1)
        sizes = [lazy.numel() // known if s == -1 else s for s in sizes]
    of_row = sizes[max(0, len(sizes) - len(row)) :]
    is_of_leading = len(sizes) >= len(row) and all(s in (-1, n) for s, n in zip(of_row, row))
    if is_of_leading and (func is aten.expand.default or math.prod(sizes) == lazy.numel()):
        return lazy.with_numbers(func(lazy.numbers, sizes[: len(sizes) - len(row)]))
    num_leading = lazy.numbers.dim()
    if func in _VIEWS and tuple(sizes[:num_leading]) == lazy.numbers.shape:
        rest = sizes[num_leading:]
        return _of_rows(lazy, lambda rows: rows.reshape(len(rows), *rest), (lazy,), {})
    raise _NeedsAllRows


def _of_rows(
    lazy: LazyRows,
    function: Callable[..., torch.Tensor],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Apply a function to rows; a small result is computed at once."""
    parts = [_part(value, lazy) for value in args]

    def rows(positions: torch.Tensor) -> torch.Tensor:
        return function(*(part(positions) for part, _ in parts), **kwargs)

    without_device = {k: v for k, v in kwargs.items() if k != "device"}
    like = function(*(like for _, like in parts), **without_device)
    numbers = torch.arange(lazy.numbers.numel()).view(lazy.numbers.shape)
    device = kwargs.get("device") or lazy.device
    made = LazyRows(rows, numbers, like, lazy.row_bytes, device)
    is_small = made.numel() * made.element_size() <= _CHUNK_BYTES
    return made.compute() if is_small or hasattr(lazy.rows, "operator") else made


def _part(value: Any, lazy: LazyRows) -> tuple[Callable[[torch.Tensor], Any], Any]:
    """An argument's values for some rows, and for one row on the device "meta"."""
    if isinstance(value, LazyRows):
        if value.numbers.shape != lazy.numbers.shape:
            raise _NeedsAllRows
        return value.at, value.like
    if not isinstance(value, torch.Tensor):
        return (lambda positions: value), value
    num_of_row = lazy.dim() - lazy.numbers.dim()
    if value.dim() <= num_of_row:
        return (lambda positions: value), _meta_like(value)
    if value.dim() > lazy.dim():
        raise _NeedsAllRows
    of_row = value.shape[value.dim() - num_of_row :]
    flat = value.expand(*lazy.numbers.shape, *of_row).reshape(-1, *of_row)
    return (lambda positions: flat[positions.to(flat.device)]), _meta_like(flat[:1])
