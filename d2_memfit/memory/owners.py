# Copyright (c) the d2_memfit developers.
"""Owners of memory: parameters, gradients, optimizer, modules, and holders of other tensors."""

import gc
from collections import Counter
from typing import Any, Optional, TypeVar

import torch
from torch import nn

from ..compat.pytorch import is_in_backward, storage_id
from .meter import TensorMeter, storages

__all__ = ["OwnerMeter", "bytes_by_kind", "live_tensors", "optimizer_states"]

_Meter = TypeVar("_Meter", bound="OwnerMeter")

_MODEL = "activations: model"  # made by the model's own code, between its modules


class OwnerMeter(TensorMeter):
    """A :class:`TensorMeter` for the model's device that knows the owner of each tensor.

    Tensors of the model, its gradients, the optimizer, and others that Python knows at the start
    count, too.

    Owners are "parameters", "buffers", "gradients", "optimizer", and these:

    - "inputs": made by the model from its batch before it calls a module;
    - "activations: " and a top-level module of the model, or a stage of the backbone;
    - "backward": needed only by the backward;
    - "other": made outside of the model.

    Args:
        model: without DDP around it.
        optimizer: the model's optimizer.

    Attributes:
        live: bytes alive now, by owner.
    """

    def __init__(self, model: nn.Module, optimizer: Optional[torch.optim.Optimizer] = None) -> None:
        super().__init__()
        self._model = model
        self._device = next(model.parameters()).device
        self._optimizer = optimizer
        self._owners: dict[int, str] = {}  # by the address of a storage
        self._running: list[str] = []  # owners of the forwards that are running, the innermost last
        self._hooks: list[Any] = []

    def __enter__(self: _Meter) -> _Meter:
        for name, module in self._model.named_modules():
            self._hooks += [
                module.register_forward_pre_hook(lambda *_, n=name: self._enter_module(n)),
                module.register_forward_hook(lambda *_: self._leave_module(), always_call=True),
            ]
        for parameter in self._model.parameters():
            self.own("parameters", parameter)
            self.own("gradients", parameter.grad)
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(
                    lambda p: self.own("gradients", p.grad)
                )
                self._hooks.append(hook)
        self.own("buffers", list(self._model.buffers()))
        if self._optimizer is not None:
            self._own_states(self._optimizer)
            self._hooks.append(self._optimizer.register_step_post_hook(self._own_states))
        self._own_others()
        return super().__enter__()

    def _own_others(self) -> None:
        for tensor in dense_tensors():  # such as another copy of the model
            if storage_id(tensor.untyped_storage()) not in self._owners:
                self.own("other", tensor)

    def __exit__(self, *error: Any) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self._running.clear()
        super().__exit__(*error)

    def _enter_module(self, name: str) -> None:
        if not name:
            self._running.append("inputs")
            return
        if self._running == ["inputs"]:
            self._running = [_MODEL]
        parts = name.split(".")
        is_stage = parts[0] == "backbone" and parts[1:] and parts[1].startswith("res")
        depth = 3 if parts[:2] == ["backbone", "bottom_up"] else 2 if is_stage else 1
        self._running.append("activations: " + ".".join(parts[:depth]))

    def _leave_module(self) -> None:
        if self._running:
            self._running.pop()

    def _own_states(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.own("optimizer", optimizer_states(optimizer))

    def own(self, owner: str, tensors: Any) -> None:
        """Assign tensors to an owner, whatever made them."""
        for storage in storages(tensors):
            self._count(storage)
            if storage_id(storage) in self._owners:
                self._move(storage_id(storage), owner)

    @property
    def live(self) -> Counter[str]:
        live: Counter[str] = Counter()
        for address, owner in self._owners.items():
            live[owner] += self._counted[address]
        return live

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == self._device.type:
            self._owners.setdefault(storage_id(storage), self._current_owner())
            super()._count(storage)

    def _uncount(self, address: int) -> None:
        super()._uncount(address)
        del self._owners[address]

    def _move(self, address: int, owner: str) -> None:
        self._owners[address] = owner

    def _current_owner(self) -> str:
        if self._running:
            return self._running[-1]
        return "backward" if is_in_backward() else "other"


def bytes_by_kind() -> Counter[str]:
    """Bytes of all tensors that Python knows, by kind, such as "float32 [256, 100] on cpu"."""
    kinds: Counter[str] = Counter()
    for tensor in dense_tensors():
        kinds[_kind_of(tensor)] += tensor.untyped_storage().nbytes()
    return kinds


def optimizer_states(optimizer: torch.optim.Optimizer) -> list[Any]:
    """An optimizer's states; only this rank's, if they are sharded."""
    return list(getattr(optimizer, "optim", optimizer).state.values())


def live_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Bytes on a device by owner, and a table of the tensors, the largest first.

    Owners are "parameters", "gradients", "buffers", "optimizer", and "tensors" for all others that
    Python can see.
    """
    owned: dict[str, list[Any]] = {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters()],
        "buffers": list(model.buffers()),
        "optimizer": optimizer_states(optimizer),
    }
    owner_of = {storage_id(s): owner for owner in owned for s in storages(owned[owner])}
    numbers: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    owners: Counter[str] = Counter()
    for tensor in (t for t in dense_tensors() if t.device == device):
        storage = tensor.untyped_storage()
        owner = owner_of.get(storage_id(storage), "tensors")
        numbers[owner, _kind_of(tensor)] += 1
        sizes[owner, _kind_of(tensor)] += storage.nbytes()
        owners[owner] += storage.nbytes()
    table = [
        {"owner": owner, "kind": kind, "count": numbers[owner, kind], "bytes": size}
        for (owner, kind), size in sizes.most_common()
    ]
    return owners, table


def _kind_of(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).replace("torch.", "")
    return f"{dtype} {list(tensor.shape)} on {tensor.device}"


def dense_tensors() -> list[torch.Tensor]:
    """A tensor for each storage that Python knows; sparse tensors have none."""
    objects = (obj for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor))
    dense = (tensor for tensor in objects if tensor.layout == torch.strided)
    return list({storage_id(tensor.untyped_storage()): tensor for tensor in dense}.values())
