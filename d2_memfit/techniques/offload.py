# Copyright (c) the d2_memfit developers.
"""Offloading of activations to the host's RAM until the backward."""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Optional, Union, cast

import torch
from torch import nn

from ..common import MB
from ..common.compat import version_of
from ..common.errors import HostMemoryError
from ..memory import available_host_bytes, error_line, on_host
from .masks import MaskBits
from .technique import Technique, find_modules, wrap_method

__all__ = ["MOST_IN_FLIGHT", "ActivationOffload"]

_SMALLEST_BYTES = 2**20  # smaller tensors are not worth a copy
MOST_IN_FLIGHT = 2  # copies to the host at a time
_LEAST_LEFT_BYTES = 2**28  # of the host's memory


class ActivationOffload(Technique):
    """Copies the tensors that modules save for the backward to the host, and back when needed.

    Saves these modules' activations on the device or, with checkpointing inside them, the kept
    inputs. Costs the same amount of the host's RAM on each rank. Costs time if copies take longer
    than computing: they run in parallel, in page-locked memory.

    Source: Rhu et al., "vDNN", arXiv:1602.08124; PyTorch's ``saved_tensors_hooks``.

    Key: The modules whose saved activations are kept on the host. Give patterns of their names,
    such as "backbone.bottom_up.res2" or "roi_heads"; "*" is all of the model. [] is none.
    """

    key, off, needs = "MEMFIT.OFFLOAD.MODULES", [], frozenset({"gpu"})

    def suggest(self, job: Any, model: nn.Module) -> list[str]:
        return ["*"]  # all, whatever their names

    def apply(self, model: nn.Module, patterns: Sequence[str]) -> nn.Module:
        offload = _Offload(next(model.parameters()).device)
        for module in find_modules(model, self.key, patterns):
            wrap_method(module, "forward", _offloaded_forward, offload)
        return model


def _offloaded_forward(
    module: nn.Module, forward: Callable[..., Any], offload: "_Offload", *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    weights = chain(module.parameters(), module.buffers())
    offload.stays = {t.untyped_storage().data_ptr() for t in weights}
    with torch.autograd.graph.saved_tensors_hooks(offload.pack, offload.unpack):
        return forward(*args, **kwargs)


class _HostCopy:
    """A saved tensor on the host.

    Attributes:
        host: the copy.
        before: the tensor saved before it, which is needed after it.
        source: the tensor itself, until the device has waited for its copy.
        identity: of the tensor when it was saved.
        fetched: the tensor on the device again.
        event: on a GPU, the end of the last copy, to the host or back.
    """

    def __init__(self, tensor: torch.Tensor, before: Optional["_HostCopy"]) -> None:
        self.host = tensor
        self.source: Optional[torch.Tensor] = tensor
        self.identity = _identity(tensor)
        self.before = None if before is None else weakref.ref(before)
        self.fetched: Optional[torch.Tensor] = None
        self.event: Optional[torch.cuda.Event] = None


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A value that two tensors share if they are the same tensor, unchanged."""
    layout = (tensor.dtype, tensor.shape, tensor.stride())
    return (tensor.data_ptr(), version_of(tensor), *layout)


class _Offload:
    """Moves tensors saved by autograd to the host and back, with its own stream on a GPU.

    All memory on the device belongs to the stream that computes. This stream waits for a copy
    before the memory of its tensor is free. So few copies are in flight, however far the host is
    ahead. On a CPU the same tensors exist, as a dry run needs them.

    Attributes:
        stays: addresses of tensors that stay on the device anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self.stays: set[int] = set()
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: Optional[weakref.ref[_HostCopy]] = None
        self._leaving: deque[weakref.ref[_HostCopy]] = deque()  # those with a source, oldest first
        # The last one that was fetched, and may not be there yet. An error must not free it.
        self._coming: Optional[_HostCopy] = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Offload, (self._device,)

    def pack(self, tensor: torch.Tensor) -> Union[torch.Tensor, _HostCopy]:
        """Start to copy a tensor to the host."""
        if isinstance(tensor, MaskBits) or tensor.device != self._device:
            return tensor
        if tensor.nbytes < _SMALLEST_BYTES or tensor.untyped_storage().data_ptr() in self.stays:
            return tensor
        last = None if self._last is None else self._last()
        if last and last.source is not None and last.identity == _identity(tensor):
            return last  # saved by the operator that made it, and by the next one
        if available_host_bytes() < tensor.nbytes + _LEAST_LEFT_BYTES:
            raise _no_host_memory(f"less than {_LEAST_LEFT_BYTES / MB:.0f} MiB would be left")
        copy = _HostCopy(tensor, last)
        self._last = weakref.ref(copy)
        try:
            with on_host():
                is_pinned = self._stream is not None
                copy.host = torch.empty_like(tensor, device="cpu", pin_memory=is_pinned)
        except RuntimeError as e:
            raise _no_host_memory(error_line(e)) from e
        self._copy(copy.host, tensor, copy)
        self._leaving.append(weakref.ref(copy))
        while len(self._leaving) > MOST_IN_FLIGHT:
            oldest = self._leaving.popleft()()
            if oldest is not None:
                self._wait_for(oldest)
                oldest.source = None
        return copy

    def unpack(self, saved: Union[torch.Tensor, _HostCopy]) -> torch.Tensor:
        """The tensor on the device; the one that is needed next is on its way."""
        if isinstance(saved, torch.Tensor):
            return saved
        self._fetch(saved)
        self._wait_for(saved)
        before = None if saved.before is None else saved.before()
        if before is not None:
            self._fetch(before)
        return cast(torch.Tensor, saved.fetched)

    def _fetch(self, saved: _HostCopy) -> None:
        if saved.source is not None and _identity(saved.source) == saved.identity:
            saved.fetched = saved.source
        saved.source = self._last = None
        if saved.fetched is not None:
            return
        if self._coming is not None:
            self._wait_for(self._coming)
        saved.fetched = torch.empty_like(saved.host, device=self._device)
        self._copy(saved.fetched, saved.host, saved)
        self._coming = saved

    def _copy(self, target: torch.Tensor, source: torch.Tensor, saved: _HostCopy) -> None:
        """Copy; on a GPU while it computes, after the work that it already has."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            saved.event = self._stream.record_event()

    def _wait_for(self, saved: _HostCopy) -> None:
        """Make the device wait for the end of a copy."""
        if saved.event is not None:
            torch.cuda.current_stream(self._device).wait_event(saved.event)
        if saved is self._coming:
            self._coming = None


def _no_host_memory(why: str) -> HostMemoryError:
    return HostMemoryError(
        f"MEMFIT.OFFLOAD.MODULES: no host memory for activations ({why}). Name fewer modules, "
        "lower DATALOADER.NUM_WORKERS, or use MEMFIT.CHECKPOINT.MODULES instead"
    )
