# Copyright (c) the d2_memfit developers.
"""Meters of the memory in use by tensors, byte by byte, and their owners."""

import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal, Optional, TypeVar

import torch
from torch import nn

from ..common.compat import DispatchMode, is_in_backward, storage_id

__all__ = ["OwnerMeter", "TensorMeter", "have_operators", "is_on_host", "live_tensors", "on_host"]
__all__ += ["optimizer_states", "storages", "tensors_in"]

_Meter = TypeVar("_Meter", bound="OwnerMeter")

_on_host = ContextVar("_on_host", default=False)
_plain = torch.Tensor.__torch_dispatch__


@contextmanager
def on_host() -> Iterator[None]:
    """While open, new tensors belong to the host, even if the CPU is the device."""
    outer = _on_host.set(True)
    try:
        yield
    finally:
        _on_host.reset(outer)


def is_on_host() -> bool:
    """Whether :func:`on_host` is open in this thread."""
    return _on_host.get()


class TensorMeter(DispatchMode):
    """While open as a context, counts the bytes of all new tensors of the device.

    It sees every storage that an operator returns, in forward and backward, and follows it until it
    is freed. So views, in-place operators and tensors saved by autograd count correctly. Tensors
    from before and an operator's scratch memory do not count. The count is exact, and the same on
    every run.

    Attributes:
        counts: where the counted tensors are made: ``device`` is outside of :func:`on_host`.
        live_bytes: bytes alive now.
        peak_bytes: the most bytes alive at one time.
    """

    counts: Literal["device", "host", "both"] = "device"

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._counted: dict[int, int] = {}  # bytes by the address of a storage
        self._watches: dict[int, Any] = {}  # weak references, of storages from before, too

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if have_operators(types):
            return NotImplemented  # they are called, and run their operators under this mode
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        self._ignore(given)
        result = self._call(func, args, kwargs, given)
        made = tensors_in(result)
        if self.counts == ("device" if _on_host.get() else "host"):
            self._ignore(made)
        for storage in _storages(made):
            address = storage_id(storage)
            known = self._counted.get(address)
            if known != storage.nbytes() and (known is not None or address not in self._watches):
                self._count(storage)
        self._note(func, args, kwargs, result, given, made)
        return result

    def _ignore(self, tensors: list[torch.Tensor]) -> None:
        """Never count these tensors, unless they are counted already."""
        for storage in _storages(tensors):
            self._watch(storage)

    def _call(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """Run an operator; ``given`` are the tensors among its arguments."""
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any, given: Any, made: Any) -> None:
        """Note more about an operator, after its result is counted."""

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes = storage_id(storage), storage.nbytes()
        self._watch(storage)
        self.live_bytes += num_bytes - self._counted.get(address, 0)  # an operator may resize it
        self._counted[address] = num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _uncount(self, address: int) -> None:
        """Remove a counted storage that is freed."""
        self.live_bytes -= self._counted.pop(address)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        address = storage_id(storage)
        if address not in self._watches:
            # A weak reference: a storage must not keep the meter, and its model, alive.
            gone = partial(_gone, weakref.ref(self), address)
            self._watches[address] = weakref.ref(storage, gone)


def _gone(meter_ref: "weakref.ref[TensorMeter]", address: int, _: Any) -> None:
    """Forget a storage that is freed."""
    meter = meter_ref()
    if meter is not None:
        del meter._watches[address]
        if address in meter._counted:
            meter._uncount(address)


class OwnerMeter(TensorMeter):
    """A :class:`TensorMeter` for the model's device that knows the owner of each tensor.

    Tensors of the model, its gradients and the optimizer count from the start.

    Owners are "parameters", "buffers", "gradients", "optimizer", and these:

    - "inputs": made by the model from its batch before it calls a module;
    - "activations: " and a top-level module, or a stage of the backbone; "model" is the model's own
      code;
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
                module.register_forward_hook(
                    lambda *a: self._leave_module(a[-1]), always_call=True
                ),
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
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        self._running.clear()
        super().__exit__(*error)

    def _enter_module(self, name: str) -> None:
        if self._running == ["inputs"]:  # until the model calls its first module
            self._running = ["activations: model"]
        parts = name.split(".")
        is_stage = parts[0] == "backbone" and parts[1:] and parts[1].startswith("res")
        depth = 3 if parts[:2] == ["backbone", "bottom_up"] else 2 if is_stage else 1
        self._running.append("activations: " + ".".join(parts[:depth]) if name else "inputs")

    def _leave_module(self, output: Any) -> None:
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


def have_operators(types: Iterable[type]) -> bool:
    """Whether one of these tensor classes has its own operators, in Python."""
    return any(getattr(t, "__torch_dispatch__", _plain) is not _plain for t in types)


def storages(values: Any) -> list[torch.UntypedStorage]:
    """Storages of all tensors in nested containers; sparse and meta tensors have none."""
    return _storages(tensors_in(values))


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tensors if not t.is_meta and t.layout is torch.strided]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and dicts, in order."""
    found: list[torch.Tensor] = []
    inner = values.values() if isinstance(values, dict) else values
    for value in inner if isinstance(values, (list, tuple, dict)) else [values]:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple, dict)):
            found += tensors_in(value)
    return found


def optimizer_states(optimizer: torch.optim.Optimizer) -> list[Any]:
    """An optimizer's states; only this rank's, if they are sharded."""
    return list(getattr(optimizer, "optim", optimizer).state.values())


def live_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, device: Optional[torch.device] = None
) -> Counter[tuple[str, str]]:
    """Bytes of all tensors that Python knows, by owner and kind.

    Owners are "parameters", "gradients", "buffers", "optimizer", and "tensors" for all others. A
    kind is such as "float32 [256, 100] on cpu".

    Args:
        device: only tensors of this device; None for all.
    """
    owned: dict[str, list[Any]] = {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters()],
        "buffers": list(model.buffers()),
        "optimizer": optimizer_states(optimizer),
    }
    owner_of = {storage_id(s): owner for owner in owned for s in storages(owned[owner])}
    sizes: Counter[tuple[str, str]] = Counter()
    for tensor in (t for t in _dense_tensors() if device in (None, t.device)):
        storage, dtype = tensor.untyped_storage(), str(tensor.dtype).replace("torch.", "")
        owner = owner_of.get(storage_id(storage), "tensors")
        sizes[owner, f"{dtype} {list(tensor.shape)} on {tensor.device}"] += storage.nbytes()
    return sizes


def _dense_tensors() -> list[torch.Tensor]:
    """A tensor for each storage that Python knows; sparse and fake tensors have none."""
    objects = (obj for obj in gc.get_objects() if issubclass(type(obj), torch.Tensor))
    dense = (t for t in objects if t.layout == torch.strided and not have_operators([type(t)]))
    return list({storage_id(tensor.untyped_storage()): tensor for tensor in dense}.values())
