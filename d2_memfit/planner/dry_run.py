# Copyright (c) the d2_memfit developers.
"""Dry runs: the timeline of a model's operators, with owners and modules, without values."""

import math
from typing import Any, Optional

import torch
from torch import nn

from ..common.compat import autograd_node_number, next_autograd_node_number, storage_id
from ..memory import OwnerMeter, is_on_host, storages, tensors_in
from ..techniques.technique import find_blocks
from .meta import make_fake
from .timeline import Allocate, Allocation, BlockCall, Free, Timeline, Workspace
from .values import LARGE_BYTES, PRODUCTS, moves_nothing, run_operator

__all__ = ["DryRun"]

_Args = tuple[Any, ...]  # arguments of an operator

aten, torchvision = torch.ops.aten, torch.ops.torchvision


class DryRun(OwnerMeter):
    """An :class:`OwnerMeter` as :class:`~.values.WithoutValues`, which records a timeline.

    Allocations have the name of their module. In a forward, it is the innermost one that runs. In a
    backward, it is the module whose forward made the running node of autograd's graph. PyTorch
    numbers these nodes in the forward and in the backward.

    Args:
        model, optimizer: as for :class:`OwnerMeter`. The model's parameters become fake.

    Attributes:
        phase: current phase of the job, set by the caller.
        timeline: the recorded events.
    """

    def __init__(self, model: nn.Module, optimizer: Optional[torch.optim.Optimizer] = None) -> None:
        super().__init__(model, optimizer)
        make_fake([p for p in model.parameters() if p.dim() > 1 or p.nbytes >= LARGE_BYTES])
        self.phase = "setup"
        self.timeline = Timeline()
        self._allocations: dict[int, Allocation] = {}  # by the address of a storage
        # Modules whose forwards run, the innermost last, with events and operations before them.
        self._modules: list[tuple[str, int, int]] = []
        self._blocks = {*find_blocks(model)}
        self._module_of_node: dict[int, str] = {}  # by its number

    def __enter__(self) -> "DryRun":
        super().__enter__()
        for name, p in self._model.named_parameters():
            self._describe(name, "", p)
        return self

    def _allocations_of(self, tensors: Any) -> set[Allocation]:
        """The recorded allocations of tensors, in any containers."""
        addresses = {storage_id(storage) for storage in storages(tensors)}
        return {self._allocations[a] for a in addresses if a in self._allocations}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: _Args = (), kwargs: Any = None
    ) -> Any:
        if self._modules:  # the last node belongs to this operator
            last = next_autograd_node_number() - 1
            self._module_of_node.setdefault(last, self._modules[-1][0])
        num_events = len(self.timeline.events)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.timeline.events) > num_events:
            module, operator = self._current_module(), func.overloadpacket.__name__
            for tensor in tensors_in(result):
                self._describe(module, operator, tensor)
        return result

    def _call(self, func: Any, args: _Args, kwargs: Any, given: list[torch.Tensor]) -> Any:
        return run_operator(func, args, kwargs, given)

    def _note(
        self, func: Any, args: _Args, kwargs: Any, result: Any, given: Any, made: list[torch.Tensor]
    ) -> None:
        if is_on_host():
            if self.phase == "forward" and not moves_nothing(func):
                self.timeline.offloaded.append(sum(t.nbytes for t in made))
            return
        if func.overloadpacket in PRODUCTS:
            factor = args[PRODUCTS[func.overloadpacket]]
            self.timeline.flops[self.phase] += 2 * result.numel() * factor.shape[-1]
        elif func is aten.convolution.default:
            self._note_convolution(args[0], args[1], result, args[3:])
        elif func is aten.convolution_backward.default:
            self._note_convolution(args[1], args[2], args[0], args[4:], sum(args[10][:2]))
        elif func is torchvision.deform_conv2d.default:
            self._note_columns(args[0], args[1], result, args[-1])
        elif func is torchvision._deform_conv2d_backward.default:
            self._note_columns(args[1], args[2], args[0], args[-1])

    def _note_convolution(
        self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, args: _Args, times: int = 1
    ) -> None:
        """Note operations and workspace; the largest is Winograd's, of 6 x 6 for 4 x 4 pixels.

        Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks", arXiv:1509.09308.

        Args:
            args: stride, padding, dilation, whether it is transposed, and more.
            times: how many gradients it computes.
        """
        stride, _, _, is_transposed, _, groups = args[:6]
        pixels = x if is_transposed else y  # every pixel meets the whole filter
        of_filter = 2 * times * pixels.numel() // pixels.shape[1]
        self.timeline.flops[self.phase] += of_filter * weight.numel()
        num_bytes = most_bytes = workspace_bytes(x, weight, y, tuple(stride), groups)
        if weight.shape[2:] == (3, 3) and {*stride} == {1} and groups == 1:
            most_bytes = max(9 * (x.nbytes + y.nbytes) // 4 + 4 * weight.nbytes, num_bytes)
        self.timeline.events.append(Workspace(num_bytes, self.phase, most_bytes))

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
            return self._modules[-1][0]
        number = autograd_node_number()
        return "" if number is None else self._module_of_node.get(number, "")

    def _enter_module(self, name: str) -> None:
        super()._enter_module(name)
        self._modules.append((name, len(self.timeline.events), self.timeline.flops["forward"]))

    def _leave_module(self, output: Any) -> None:
        """Record the call of a block, unless a backward computes it again."""
        super()._leave_module(output)
        if not self._modules:
            return
        (name, begin, flops), end = self._modules.pop(), len(self.timeline.events)
        if name in self._blocks and self.phase == "forward" and torch.is_grad_enabled():
            flops = self.timeline.flops["forward"] - flops
            outputs = self._allocations_of(output)
            self.timeline.calls.append(BlockCall(name, begin, end, flops, outputs))

    def _describe(self, module: str, operator: str, tensor: Any) -> None:
        """Name an allocation, unless its module is known."""
        for storage in storages(tensor):
            allocation = self._allocations.get(storage_id(storage))
            if allocation is not None and not allocation.module:
                allocation.dtype, allocation.shape = tensor.dtype, tuple(tensor.shape)
                allocation.module, allocation.operator = module, operator


def workspace_bytes(
    x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, stride: tuple[int, ...], groups: int
) -> int:
    """What a convolution takes while it runs: copies of its tensors in another memory layout.

    Kernels for tensor cores want channels last, and oneDNN's a blocked layout.
    """
    return x.nbytes + weight.nbytes + y.nbytes
