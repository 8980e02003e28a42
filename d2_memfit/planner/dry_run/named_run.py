# Copyright (c) the d2_memfit developers.
"""Dry runs that record the tensor and module of each allocation."""

from typing import Any, Optional

import torch
from torch import nn

from ...compat.pytorch import autograd_node_number, next_autograd_node_number, storage_id, tree_iter
from ...memory import storages
from .dry_run import DryRun

__all__ = ["NamedDryRun"]


class NamedDryRun(DryRun):
    """A :class:`DryRun` that names its allocations.

    In a forward, the module is the innermost one that runs. In a backward, it is the module whose
    forward made the running node of autograd's graph. PyTorch numbers these nodes in the forward
    and in the backward.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optional[torch.optim.Optimizer] = None,
        inputs: Any = (),
    ) -> None:
        super().__init__(model, optimizer, inputs)
        self._modules: list[str] = []  # modules whose forwards run, the innermost last
        self._module_of_node: dict[int, str] = {}  # by its number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._modules:  # the last node belongs to this operator
            last = next_autograd_node_number() - 1
            self._module_of_node.setdefault(last, self._modules[-1])
        num_events = len(self.timeline.events)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.timeline.events) > num_events:
            module, operator = self._current_module(), func.overloadpacket.__name__
            for tensor in tree_iter(result):
                self._describe(module, operator, tensor)
        return result

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
        super()._own_others()
        for input_ in self._inputs:
            self._describe("", "input", input_)
        self._name_what_is_of_parameters()

    def _own_states(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        super()._own_states(optimizer, *args)
        self._name_what_is_of_parameters()

    def _name_what_is_of_parameters(self) -> None:
        """Name parameters, buffers, gradients and optimizer states."""
        optimizer = getattr(self._optimizer, "optim", self._optimizer)  # of a sharded one
        states = {} if optimizer is None else optimizer.state
        for name, p in [*self._model.named_parameters(), *self._model.named_buffers()]:
            for what, tensors in (("", p), ("gradient", p.grad), ("state", states.get(p))):
                for tensor in tree_iter(tensors):
                    self._describe(name, what, tensor)

    def _describe(self, module: str, operator: str, tensor: Any) -> None:
        """Name an allocation, unless its module is known."""
        for storage in storages(tensor):
            allocation = self._allocations.get(storage_id(storage))
            if allocation is not None and not allocation.module:
                allocation.dtype, allocation.shape = tensor.dtype, tuple(tensor.shape)
                allocation.module, allocation.operator = module, operator
