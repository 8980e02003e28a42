# Copyright (c) the d2_memfit developers.
"""A meter of the memory in use by tensors, byte by byte."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

import torch

from ..compat.pytorch import TorchDispatchMode, storage_id

__all__ = [
    "TensorMeter",
    "have_operators",
    "is_on_host",
    "on_host",
    "storages",
    "tensors_in",
]


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


class TensorMeter(TorchDispatchMode):
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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # PyTorch would import torch._dynamo, and wrap each call of this class

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
        for storage in _storages_of(made):
            address = storage_id(storage)
            if address in self._counted or address not in self._watches:
                self._count(storage)
        self._note(func, args, kwargs, result, given, made)
        return result

    def _ignore(self, tensors: list[torch.Tensor]) -> None:
        """Never count these tensors, unless they are counted already."""
        for storage in _storages_of(tensors):
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


def have_operators(types: Iterable[type]) -> bool:
    """Whether one of these tensor classes has its own operators, in Python."""
    return any(getattr(t, "__torch_dispatch__", _plain) is not _plain for t in types)


def storages(values: Any) -> list[torch.UntypedStorage]:
    """Storages of all tensors in nested containers; sparse and meta tensors have none."""
    return _storages_of(tensors_in(values))


def _storages_of(tensors: list[torch.Tensor]) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tensors if not t.is_meta and t.layout is torch.strided]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and dicts, in order."""
    found: list[torch.Tensor] = []
    _collect((values,), found)
    return found


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)
