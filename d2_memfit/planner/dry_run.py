# Copyright (c) the d2_memfit developers.
"""Dry runs: operators at full size that allocate memory and compute nothing large."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from mmap import mmap
from typing import Any, Optional

import torch
from torch import nn

from ..common.compat import (
    TorchDispatchMode,
    autograd_node_number,
    next_autograd_node_number,
    schema,
    storage_id,
)
from ..job import is_image
from ..memory import OwnerMeter, have_operators, is_on_host, storages, tensors_in
from ..techniques.blocks import find_blocks
from .meta import is_fake, make_fake, mapped, on_meta
from .timeline import Allocate, Allocation, BlockCall, Free, Timeline, Workspace

__all__ = ["DryRun", "WithoutValues", "noted_calls"]

_Args = tuple[Any, ...]  # arguments of an operator
_Kwargs = dict[str, Any]
_Tensors = list[torch.Tensor]  # among the arguments, or in the result

aten, torchvision = torch.ops.aten, torch.ops.torchvision
# cuda_as_cpu would replace them, which takes time.
_empty, _empty_strided = torch.empty, torch.empty_strided

_LARGE_BYTES = 2**20  # smaller results are cheap to compute
_DENSE_BYTES = 2**26  # masks converted to floats of this size are targets of a loss
_STEP = 5e-7  # resolution of float32 at -4.6, the bias of a focal loss
_RANDOM_FILLS = {aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float}
_FILLS = {
    *(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default),
    *(aten.ones.default, aten.ones_like.default, aten.new_ones.default),
    *(aten.full.default, aten.full_like.default, aten.new_full.default),
    *(aten.rand.default, aten.randn.default),
}
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
_PRODUCTS = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.baddbmm: 1}
_TRUE_OF_ZEROS = {aten.ge.Tensor, aten.le.Tensor}
# Views by another name, and the operator that resizes its argument.
_LIKE_VIEWS = {aten._unsafe_view.default, aten._reshape_alias.default, aten.resize_.default}


class WithoutValues(TorchDispatchMode):
    """While open, results of fake tensors are fake too.

    Fake tensors have values that do not matter, such as a model's weights. Results from them are
    not computed: PyTorch's meta kernels give the size. A large result gets memory that is never
    written to, so it takes address space, but no RAM. A small result is zeros. Everything else is
    computed, so labels are assigned and proposals sampled as usual.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in TensorMeter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: _Args = (), kwargs: Any = None
    ) -> Any:
        if have_operators(types):
            return NotImplemented
        kwargs = kwargs or {}
        return _run(func, args, kwargs, tensors_in((args, kwargs)))


class DryRun(OwnerMeter):
    """An :class:`OwnerMeter` with :class:`WithoutValues`, which records a timeline.

    Allocations have the name of their module. In a forward, it is the innermost one that runs. In a
    backward, it is the module whose forward made the running node of autograd's graph. PyTorch
    numbers these nodes in the forward and in the backward.

    Args:
        model, optimizer: as for :class:`OwnerMeter`. The model's parameters become fake.
        inputs: tensors that are on the device before the model runs. Large images become fake;
            labels and masks keep their values.

    Attributes:
        phase: current phase of the job, set by the caller.
        timeline: the recorded events.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optional[torch.optim.Optimizer] = None,
        inputs: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__(model, optimizer)
        make_fake([p for p in model.parameters() if p.dim() > 1 or p.nbytes >= _LARGE_BYTES])
        make_fake([t for t in inputs if t.nbytes >= _LARGE_BYTES and is_image(t)])
        self.phase = "setup"
        self.timeline = Timeline()
        self._inputs = inputs
        self._allocations: dict[int, Allocation] = {}  # by the address of a storage
        self._modules: list[str] = []  # modules whose forwards run, the innermost last
        self._module_of_node: dict[int, str] = {}  # by its number

    def allocations_of(self, tensors: Any) -> set[Allocation]:
        """The recorded allocations of tensors, in any containers."""
        addresses = {storage_id(storage) for storage in storages(tensors)}
        return {self._allocations[a] for a in addresses if a in self._allocations}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: _Args = (), kwargs: Any = None
    ) -> Any:
        if self._modules:  # the last node belongs to this operator
            last = next_autograd_node_number() - 1
            self._module_of_node.setdefault(last, self._modules[-1])
        num_events = len(self.timeline.events)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.timeline.events) > num_events:
            module, operator = self._current_module(), func.overloadpacket.__name__
            for tensor in tensors_in(result):
                self._describe(module, operator, tensor)
        return result

    def _call(self, func: Any, args: _Args, kwargs: _Kwargs, given: _Tensors) -> Any:
        return _run(func, args, kwargs, given)

    def _note(
        self,
        func: Any,
        args: _Args,
        kwargs: _Kwargs,
        result: Any,
        given: _Tensors,
        made: _Tensors,
    ) -> None:
        if is_on_host():
            if self.phase == "forward" and not _moves_nothing(func):
                self.timeline.offloaded.append(sum(t.nbytes for t in made))
            return
        self.timeline.flops[self.phase] += _flops(func, args, result)
        if func is aten.convolution.default:
            self._note_workspace(args[0], args[1], result, args)
        elif func is aten.convolution_backward.default:
            self._note_workspace(args[1], args[2], args[0], args[1:])
        elif func is torchvision.deform_conv2d.default:
            self._note_columns(args[0], args[1], result, args[-1])
        elif func is torchvision._deform_conv2d_backward.default:
            self._note_columns(args[1], args[2], args[0], args[-1])

    def _note_workspace(
        self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, args: _Args
    ) -> None:
        """Note a convolution's workspace; the largest is Winograd's, of 6 x 6 for 4 x 4 pixels.

        Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308.
        """
        num_bytes = workspace_bytes(x, weight, y, tuple(args[3]), args[8])
        most_bytes = 0
        if weight.shape[2:] == (3, 3) and {*args[3]} == {1} and args[8] == 1:
            most_bytes = 9 * (x.nbytes + y.nbytes) // 4 + 4 * weight.nbytes
        self.timeline.events.append(Workspace(num_bytes, self.phase, max(most_bytes, num_bytes)))

    def _note_columns(
        self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, with_mask: bool
    ) -> None:
        """Note the buffers of Detectron2's deform_conv_cuda.cu.

        They are columns of an image; without a mask, of up to 64 images, and a copy of the result.
        """
        most = 1 if with_mask else max(n for n in range(1, 65) if len(x) % n == 0)
        pixels = most * math.prod(y.shape[2:])
        columns = x.shape[1] * math.prod(weight.shape[2:]) * pixels * x.element_size()
        num_bytes = columns + (0 if with_mask else y.nbytes)
        self.timeline.events.append(Workspace(num_bytes, self.phase, num_bytes))

    def _count(self, storage: torch.UntypedStorage) -> None:
        super()._count(storage)
        address = storage_id(storage)
        if address in self._counted and address not in self._allocations:
            allocation = Allocation(storage.nbytes(), self._owners[address], self.phase)
            self._allocations[address] = allocation
            self.timeline.events.append(Allocate(allocation))

    def _uncount(self, address: int) -> None:
        super()._uncount(address)
        self.timeline.events.append(Free(self._allocations.pop(address)))

    def _move(self, address: int, owner: str) -> None:
        super()._move(address, owner)
        self._allocations[address].owner = owner

    def _current_module(self) -> str:
        if self._modules:
            return self._modules[-1]
        number = autograd_node_number()
        return "" if number is None else self._module_of_node.get(number, "")

    def _enter_module(self, name: str) -> None:
        super()._enter_module(name)
        self._modules.append(name)

    def _leave_module(self) -> None:
        super()._leave_module()
        if self._modules:
            self._modules.pop()

    def _own_others(self) -> None:
        self.own("inputs", self._inputs)
        for input_ in self._inputs:
            self._describe("", "input", input_)
        for name, p in self._model.named_parameters():
            self._describe(name, "", p)

    def _describe(self, module: str, operator: str, tensor: Any) -> None:
        """Name an allocation, unless its module is known."""
        for storage in storages(tensor):
            allocation = self._allocations.get(storage_id(storage))
            if allocation is not None and not allocation.module:
                allocation.dtype, allocation.shape = tensor.dtype, tuple(tensor.shape)
                allocation.module, allocation.operator = module, operator


@contextmanager
def noted_calls(model: nn.Module, run: DryRun) -> Iterator[None]:
    """While open, record in the timeline the calls of blocks for which autograd saves tensors.

    Calls in a backward, which recompute a block, are not recorded.
    """
    begun: list[tuple[int, int]] = []

    def begin(*_: Any) -> None:
        begun.append((len(run.timeline.events), run.timeline.flops["forward"]))

    def end(name: str, module: Any, args: Any, result: Any) -> None:
        position, flops = begun.pop()
        if run.phase == "forward" and torch.is_grad_enabled():
            flops, num_events = run.timeline.flops["forward"] - flops, len(run.timeline.events)
            outputs = run.allocations_of(result)
            run.timeline.calls.append(BlockCall(name, position, num_events, flops, outputs))

    handles = []
    for name in find_blocks(model):
        block = model.get_submodule(name)
        handles += [
            block.register_forward_pre_hook(begin),
            block.register_forward_hook(partial(end, name)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def workspace_bytes(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, stride: tuple[int, ...], groups: int
) -> int:
    """What a convolution takes while it runs: copies of its tensors in another memory layout.

    Kernels for tensor cores want channels last, and oneDNN's a blocked layout.
    """
    return x.nbytes + weight.nbytes + y.nbytes


def _flops(func: Any, args: _Args, result: Any) -> int:
    """Floating-point operations of a convolution or a matrix product; 0 for others."""
    if func.overloadpacket in _PRODUCTS:
        factor = args[_PRODUCTS[func.overloadpacket]]
        return 2 * result.numel() * factor.shape[-1]
    if func is aten.convolution.default:
        x, weight, y, is_transposed, gradients = args[0], args[1], result, args[6], 1
    elif func is aten.convolution_backward.default:
        (y, x, weight), is_transposed, gradients = args[:3], args[7], sum(args[10][:2])
    else:
        return 0
    pixels = x if is_transposed else y  # every pixel meets the whole filter
    return 2 * gradients * pixels.numel() // pixels.shape[1] * weight.numel()


@cache
def _moves_nothing(func: Any) -> bool:
    return func.is_view or torch.Tag.inplace_view in func.tags or func in _LIKE_VIEWS


def _run(func: Any, args: _Args, kwargs: _Kwargs, given: _Tensors) -> Any:
    if _moves_nothing(func):
        return func(*args, **kwargs)
    if func in _RANDOM_FILLS and args[0].nbytes >= _LARGE_BYTES:
        return make_fake(args[0])
    if func in _FILLS:
        filled = on_meta(func, args, {**kwargs, "device": torch.device("meta")})
        is_real = filled.nbytes < _LARGE_BYTES or not filled.is_floating_point()
        return func(*args, **kwargs) if is_real else _from_meta(filled)
    is_needed = not _makes_much(func, args, kwargs) and not _multiplies_gradients(func)
    if is_needed and not is_fake(given) and not _makes_predictions(func, args, kwargs, given):
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


def _makes_much(func: Any, args: _Args, kwargs: _Kwargs) -> bool:
    """Whether an operator makes a large result from labels, whose values do not matter."""
    if func is aten._to_copy.default:
        dtype = kwargs.get("dtype") or args[0].dtype
        num_bytes = args[0].numel() * dtype.itemsize
        is_target = dtype.is_floating_point and not args[0].is_floating_point()
        return is_target and num_bytes >= _DENSE_BYTES
    if func in _GATHERING and tensors_in(args[0])[0].dtype is torch.bool:
        return _most_bytes(func, args, kwargs) >= _DENSE_BYTES
    return func.overloadpacket in _UPSAMPLING and not args[0].is_meta


def _makes_predictions(func: Any, args: _Args, kwargs: _Kwargs, given: _Tensors) -> bool:
    """Whether an operator makes large predictions or gradients, whose values do not matter."""
    has_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    if not has_gradient and autograd_node_number() is None:
        return False
    return _most_bytes(func, args, kwargs, is_float=True) >= _LARGE_BYTES


def _most_bytes(func: Any, args: _Args, kwargs: _Kwargs, is_float: bool = False) -> int:
    """Bytes of an operator's largest result; 0 if its size depends on values."""
    try:
        made = tensors_in(on_meta(func, args, kwargs))
    except RuntimeError:
        return 0
    return max((t.nbytes for t in made if not is_float or t.is_floating_point()), default=0)


def _multiplies_gradients(func: Any) -> bool:
    """Whether an operator is a matrix product in a backward, where no size depends on values."""
    operator = func.overloadpacket
    is_product = operator in _PRODUCTS or func is aten.convolution_backward.default
    is_product = is_product or "attention" in operator.__name__
    return is_product and autograd_node_number() is not None


def _without_computing(func: Any, args: _Args, kwargs: _Kwargs) -> Any:
    changed = _changed_arguments(func, args, kwargs)
    make_fake([t for t in changed if t.nbytes >= _LARGE_BYTES])
    returns = schema(func).returns
    if all(r.alias_info and r.alias_info.is_write for r in returns):
        return (changed[0] if len(returns) == 1 else tuple(changed)) if returns else None
    if func is aten.index.Tensor:
        args = (args[0], _without_masks(args[1]))
    # As of zeros: criteria assert that no box has its right side left of its left one.
    is_true = func in _TRUE_OF_ZEROS or func.overloadpacket is aten.all
    fill = int(is_true or _asks_if_finite(func, args))
    result = mapped(lambda t: _from_meta(t, fill), on_meta(func, args, kwargs))
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


def _asks_if_finite(func: Any, args: _Args) -> bool:
    """Whether an operator is part of ``isfinite``: ``x == x`` or ``x.abs() != inf``."""
    if func is aten.eq.Tensor:
        return args[0] is args[1]
    return func is aten.ne.Scalar and args[1] == math.inf


def _changed_arguments(func: Any, args: _Args, kwargs: _Kwargs) -> _Tensors:
    changed = [
        args[i] if i < len(args) else kwargs.get(name) for i, name in _written_arguments(func)
    ]
    return tensors_in(changed)


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
    if not isinstance(value, torch.Tensor):
        return value
    num_bytes = value.untyped_storage().nbytes()
    if num_bytes < _LARGE_BYTES:
        result = _empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return result.fill_(fill)
    # Shared memory that no other process has: it is not counted by a limit on private memory, such
    # as ulimit -d.
    storage = torch.frombuffer(mmap(-1, num_bytes), dtype=torch.uint8).untyped_storage()
    result = _empty(0, dtype=value.dtype)
    return make_fake(result.set_(storage, 0, value.shape, value.stride()))
