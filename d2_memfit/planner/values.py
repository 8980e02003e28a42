# Copyright (c) the d2_memfit developers.
"""Operators at full size that allocate memory and compute nothing large."""

import math
from functools import cache
from mmap import mmap
from typing import Any

import torch

from ..common.compat import DispatchMode, autograd_node_number, schema
from ..memory import have_operators, tensors_in
from .meta import is_fake, make_fake, on_meta

__all__ = ["LARGE_BYTES", "PRODUCTS", "WithoutValues", "moves_nothing", "run_operator"]

_Args = tuple[Any, ...]  # arguments of an operator
_Kwargs = dict[str, Any]
_Tensors = list[torch.Tensor]  # among the arguments, or in the result

aten = torch.ops.aten
# cuda_as_cpu would replace them, which takes time.
_empty, _empty_strided = torch.empty, torch.empty_strided

LARGE_BYTES = 2**20  # smaller results are cheap to compute
_POINTS_BYTES = 2**16  # so many places at random are points of masks, where losses sample them
_DENSE_BYTES = 2**26  # masks converted to floats of this size are targets of a loss
_STEP = 5e-7  # resolution of float32 at -4.6, the bias of a focal loss
_RANDOM_FILLS = {aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float}
_FILLS = {
    *(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default),
    *(aten.ones.default, aten.ones_like.default, aten.new_ones.default),
    *(aten.full.default, aten.full_like.default, aten.new_full.default),
    *(aten.rand.default, aten.randn.default),
}
# Theirs may hold what is left of freed memory, such as NaN; nothing is written if that is fake.
_EMPTY = {aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}
_WAVES = {aten.sin, aten.cos}  # large ones are embeddings of positions
# They make large results from small inputs, such as a keypoint's heatmap. The values do not matter.
_UPSAMPLING = {aten.upsample_bicubic2d, aten.upsample_bilinear2d, aten.upsample_nearest2d}
# They copy the masks of objects, and nothing but a loss depends on the values.
_GATHERING = {aten.cat.default, aten.index.Tensor}
# Operators that add a bias: its position among the arguments, and its dimension in the result.
_BIASES = {
    aten.addmm.default: (0, -1),
    aten.convolution.default: (2, 1),
    aten.native_batch_norm.default: (2, 1),
    aten.native_group_norm.default: (2, 1),
    aten.native_layer_norm.default: (3, -1),
}
# Matrix products, and the position of the first factor, by whose last dimension they sum.
PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}
_TRUE_OF_ZEROS = {aten.ge.Tensor, aten.le.Tensor}
# Views by another name, and the operator that resizes its argument.
_LIKE_VIEWS = {aten._unsafe_view.default, aten._reshape_alias.default, aten.resize_.default}


class WithoutValues(DispatchMode):
    """While open, results of fake tensors are fake too.

    Fake tensors have values that do not matter, such as a model's weights. Results from them are
    not computed: PyTorch's meta kernels give the size. A large result gets memory that is never
    written to, so it takes address space, but no RAM. A small result is zeros. Everything else is
    computed, so labels are assigned and proposals sampled as usual.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: _Args = (), kwargs: Any = None
    ) -> Any:
        if have_operators(types):
            return NotImplemented
        kwargs = kwargs or {}
        return run_operator(func, args, kwargs, tensors_in((args, kwargs)))


@cache
def moves_nothing(func: Any) -> bool:
    return func.is_view or torch.Tag.inplace_view in func.tags or func in _LIKE_VIEWS


def run_operator(func: Any, args: _Args, kwargs: _Kwargs, given: _Tensors) -> Any:
    if moves_nothing(func):
        return func(*args, **kwargs)
    if func in _EMPTY:
        made = func(*args, **kwargs)
        return made.zero_() if made.nbytes < LARGE_BYTES else made
    if func in _RANDOM_FILLS and args[0].nbytes >= LARGE_BYTES:
        return make_fake(args[0])
    if func in _FILLS:
        filled = on_meta(func, args, {**kwargs, "device": torch.device("meta")})
        is_points = func is aten.rand.default and filled.shape[-1:] == (2,)
        most = _POINTS_BYTES if is_points else LARGE_BYTES
        is_real = filled.nbytes < most or not filled.is_floating_point()
        return func(*args, **kwargs) if is_real else make_fake(_from_meta(filled))
    if _is_needed(func, args, kwargs, given):
        return func(*args, **kwargs)
    try:
        return _without_computing(func, args, kwargs)
    except RuntimeError:  # no meta kernel, or the size of the result depends on values
        if func is aten.nonzero.default:  # zeros have no indices; skips making the large tensor
            return func(torch.zeros([0] * args[0].dim(), dtype=torch.bool))
        for tensor in given:
            if is_fake(tensor):
                tensor.zero_()
        return func(*args, **kwargs)


def _is_needed(func: Any, args: _Args, kwargs: _Kwargs, given: _Tensors) -> bool:
    """Whether an operator has results whose values may matter.

    Those of large predictions and gradients do not, nor those of large targets of a loss, and no
    size depends on the products in a backward.
    """
    operator, in_backward = func.overloadpacket, autograd_node_number() is not None
    is_product = operator in PRODUCTS or func is aten.convolution_backward.default
    if is_fake(given) or (in_backward and (is_product or "attention" in operator.__name__)):
        return False
    if func is aten.take.default and args[0].dtype is torch.uint8:  # points of packed masks
        return False
    is_wave = operator in _WAVES and args[0].nbytes >= LARGE_BYTES
    if is_wave or (operator in _UPSAMPLING and not args[0].is_meta):
        return False
    if func is aten._to_copy.default:
        dtype = kwargs.get("dtype") or args[0].dtype
        is_target = dtype.is_floating_point and not args[0].is_floating_point()
        if is_target and args[0].numel() * dtype.itemsize >= _DENSE_BYTES:
            return False
    gathers = func in _GATHERING and tensors_in(args[0])[0].dtype is torch.bool
    if gathers and _most_bytes(func, args, kwargs) >= _DENSE_BYTES:
        return False
    if not in_backward and not (torch.is_grad_enabled() and any(t.requires_grad for t in given)):
        return True
    return _most_bytes(func, args, kwargs, is_float=True) < LARGE_BYTES


def _most_bytes(func: Any, args: _Args, kwargs: _Kwargs, is_float: bool = False) -> int:
    """Bytes of an operator's largest result; 0 if its size depends on values."""
    try:
        made = tensors_in(on_meta(func, args, kwargs))
    except RuntimeError:
        return 0
    return max((t.nbytes for t in made if not is_float or t.is_floating_point()), default=0)


def _without_computing(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    written = _written_arguments(func)
    changed = tensors_in([args[i] if i < len(args) else kwargs.get(name) for i, name in written])
    make_fake([t for t in changed if t.nbytes >= LARGE_BYTES])
    returns = schema(func).returns
    if all(r.alias_info and r.alias_info.is_write for r in returns):
        return (changed[0] if len(returns) == 1 else tuple(changed)) if returns else None
    if func is aten.index.Tensor:
        args = (args[0], _without_masks(args[1]))
    # As of zeros: criteria assert that no box has its right side left of its left one.
    is_true = func in _TRUE_OF_ZEROS or func.overloadpacket is aten.all
    is_true = is_true or (func is aten.eq.Tensor and args[0] is args[1])  # isfinite: x == x
    is_true = is_true or (func is aten.ne.Scalar and args[1] == math.inf)  # and x.abs() != inf
    result = _from_meta(on_meta(func, args, kwargs), int(is_true))
    if func in _BIASES:
        _add_bias(func, args, result)
    # Small weights in 16 bits are still weights.
    return make_fake(result) if func is aten._to_copy.default else result


def _add_bias(func: Any, args: _Args, result: Any) -> None:
    """Fill a small result as if all weights were 0, so that scores stay at their biases.

    No two values are equal, so that a top-k keeps k of them and not all ties.
    """
    position, dim = _BIASES[func]
    bias, y = args[position], result[0] if isinstance(result, tuple) else result
    if bias is not None and bias.dim() == 1 and not is_fake((bias, y)):
        y.movedim(dim, -1).copy_(bias)
        y.sub_((torch.arange(y.numel()) * _STEP).view(y.shape))  # in 16 bits alone it would be inf


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Positions and names of the arguments that an operator writes to."""
    arguments = enumerate(schema(func).arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info and a.alias_info.is_write]


def _without_masks(indices: list[Any]) -> list[Any]:
    """Replace masks by the indices of their true elements, as indexing does."""
    result = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            result.append(index)
        elif is_fake(index):
            raise RuntimeError("the size of the result depends on values")
        else:
            result += index.nonzero().unbind(1)
    return result


def _from_meta(value: Any, fill: int = 0) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_from_meta(v, fill) for v in value)
    if not isinstance(value, torch.Tensor):
        return value
    num_bytes = value.untyped_storage().nbytes()
    if num_bytes < LARGE_BYTES:
        result = _empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return result.fill_(fill)
    # Shared memory that no other process has: it is not counted by a limit on private memory, such
    # as ulimit -d.
    storage = torch.frombuffer(mmap(-1, num_bytes), dtype=torch.uint8).untyped_storage()
    result = _empty(0, dtype=value.dtype)
    return make_fake(result.set_(storage, 0, value.shape, value.stride()))
