"""Memory in tensors, counted byte by byte."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["TensorMeter"]


class TensorMeter(TorchDispatchMode):
    """While it is open as a context, it counts the bytes of all tensors that come to life.

    It sees every storage that an operator returns, in forward and in backward, and follows it until
    it is freed, so that views, in-place operators and what autograd saves count as they are. What
    was alive before does not count. The count is exact, and the same on every run; an operator's
    scratch memory is not in it.

    Attributes:
        live_bytes: alive now.
        peak_bytes: the most that was alive at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: set[int] = set()  # storages, by address: counted ones, and those of arguments

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._follow(tensor.untyped_storage(), num_bytes=0)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            self._follow(storage, storage.nbytes())
        return result

    def _follow(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        address = storage._cdata
        if address in self._known:
            return
        self._known.add(address)
        weakref.finalize(storage, self._freed, address, num_bytes).atexit = False
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _freed(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self.live_bytes -= num_bytes


def _tensors(values: Any) -> list:
    return [v for v in tree_iter(values) if isinstance(v, torch.Tensor)]
