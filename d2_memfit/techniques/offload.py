# Copyright (c) the d2_memfit developers.
"""Offloading of activations to the host's RAM until the backward."""

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional, Union

import torch
from detectron2.config import CfgNode
from detectron2.utils.logger import log_first_n
from torch import nn

from ..common.units import GB, MB
from ..compat.pytorch import version_of
from ..errors import HostMemoryError
from ..memory import available_host_bytes, error_line, on_host
from .registry import TECHNIQUES, ModulesTechnique
from .support import add_mixin, find_modules

__all__ = ["MOST_IN_FLIGHT_BYTES", "ActivationOffload"]

logger = logging.getLogger(__name__)

_SMALLEST_BYTES = 2**20  # smaller tensors are not worth a copy
MOST_IN_FLIGHT_BYTES = 2**26  # of copies to the host, which take 5 ms at 12 GB/s
_CHECK_EVERY_BYTES = 2**28
_WARN_BELOW_BYTES = 2**31


@TECHNIQUES.register()
class ActivationOffload(ModulesTechnique):
    """Copies the tensors that modules save for the backward to the host, and back when needed.

    Saves these modules' activations on the device or, with checkpointing inside them, the kept
    inputs. Costs the same amount of the host's RAM on each rank. Costs time if copies take longer
    than computing: they run in parallel, in page-locked memory.

    Source: Rhu et al., "vDNN", arXiv:1602.08124; PyTorch's ``saved_tensors_hooks``.

    Key: The modules whose saved activations are kept on the host. Give patterns of their names,
    such as "backbone.bottom_up.res2" or "roi_heads"; "*" is all of the model. [] is none.
    """

    tier = "exact"
    part = "model"
    gpu_only = True
    order = 2  # kept inputs of checkpoints are offloaded, too
    key = "MEMFIT.OFFLOAD.MODULES"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        return {"MEMFIT.OFFLOAD.MODULES": ["*"]}  # all, whatever their names

    @classmethod
    def apply(cls, model: nn.Module, cfg: CfgNode) -> nn.Module:
        device = next(model.parameters()).device
        if torch.device(cfg.MODEL.DEVICE).type == "cpu":
            logger.warning(
                "MEMFIT.OFFLOAD.MODULES saves nothing with MODEL.DEVICE cpu, where activations are "
                "on the host already"
            )
        offload = _Offload(device)
        for module in find_modules(model, cls.key, cfg.MEMFIT.OFFLOAD.MODULES):
            add_mixin(module, _Offloaded, offload=offload)
        return model


class _Offloaded(nn.Module):
    offload: "_Offload"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        weights = {t.untyped_storage().data_ptr() for t in (*self.parameters(), *self.buffers())}
        with self.offload.offloading(weights):
            return super().forward(*args, **kwargs)


class _HostCopy:
    """A saved tensor on the host.

    Attributes:
        host: the copy.
        before: the tensor saved before it.
        source: the tensor itself, until the device has waited for its copy.
        changes: how often the source had been changed in place.
        fetched: the tensor on the device again.
        event: on a GPU, the end of the last copy, to the host or back.
    """

    def __init__(self, tensor: torch.Tensor, before: Optional["_HostCopy"]) -> None:
        self.host = tensor
        self.before = None if before is None else weakref.ref(before)
        self.source: Optional[torch.Tensor] = tensor
        self.changes = version_of(tensor)
        self.fetched: Optional[torch.Tensor] = None
        self.event: Optional[torch.cuda.Event] = None


class _Offload:
    """Moves tensors saved by autograd to the host and back, with its own stream on a GPU.

    All memory on the device belongs to the stream that computes. This stream waits for a copy
    before the memory of its tensor is free. This bounds the copies in flight, however far the host
    is ahead. A dry run keeps the same tensors.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _Offload, (self._device,)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._weights: set[int] = set()  # addresses of tensors that stay on the device anyway
        # The tensor is kept, so that no other can have its address.
        self._last: Optional[tuple[torch.Tensor, tuple[Any, ...], _HostCopy]] = None
        self._leaving: list[weakref.ref[_HostCopy]] = []  # those with a source, oldest first
        # The last one that was fetched, and may not be there yet. An error must not free it.
        self._coming: Optional[_HostCopy] = None
        self._bytes_since_check = 0

    @contextmanager
    def offloading(self, weights: set[int]) -> Iterator[None]:
        before = self._weights
        self._weights = weights
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._weights = before
            self._last = None

    def _pack(self, tensor: torch.Tensor) -> Union[torch.Tensor, _HostCopy]:
        if (
            tensor.device != self._device
            or tensor.nbytes < _SMALLEST_BYTES
            or tensor.untyped_storage().data_ptr() in self._weights
        ):
            return tensor
        identity = _identity(tensor)
        before = None
        if self._last is not None:
            _, last_identity, before = self._last
            if identity == last_identity:  # saved by the operator that made it, and by the next one
                return before
        self._check_host(tensor.nbytes)
        packed = _HostCopy(tensor, before)
        self._copy_to_host(packed)
        self._leaving.append(weakref.ref(packed))
        self._free_sources()
        self._last = tensor, identity, packed
        return packed

    def _unpack(self, packed: Union[torch.Tensor, _HostCopy]) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        self._fetch(packed)
        self._wait_for(packed)
        before = None if packed.before is None else packed.before()
        if before is not None:  # needed next; fetched while this one is used
            self._fetch(before)
        assert packed.fetched is not None
        return packed.fetched

    def _copy_to_host(self, packed: _HostCopy) -> None:
        tensor = packed.host
        if self._stream is None:
            with on_host():
                packed.host = tensor.clone()
            return
        try:
            packed.host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        except RuntimeError as e:
            raise _no_host_memory(error_line(e)) from e
        self._copy(packed.host, tensor, packed)

    def _free_sources(self) -> None:
        """Free the oldest sources, so that all but the newest one have bounded bytes."""
        living = [packed for ref in self._leaving if (packed := ref()) is not None]
        sources = [packed for packed in living if packed.source is not None]
        num_bytes = sum(packed.host.nbytes for packed in sources)
        while len(sources) > 1 and num_bytes > MOST_IN_FLIGHT_BYTES:
            oldest = sources.pop(0)
            num_bytes -= oldest.host.nbytes
            self._wait_for(oldest)
            oldest.source = None
        self._leaving = list(map(weakref.ref, sources))

    def _fetch(self, packed: _HostCopy) -> None:
        source = packed.source
        if source is not None and version_of(source) == packed.changes:
            packed.fetched = source
        packed.source = None
        if packed.fetched is not None:
            return
        if self._stream is None:
            packed.fetched = packed.host.clone()  # memory that counts as the device's
            return
        if self._coming is not None:
            self._wait_for(self._coming)
        packed.fetched = torch.empty_like(packed.host, device=self._device)
        self._copy(packed.fetched, packed.host, packed)
        self._coming = packed

    def _copy(self, target: torch.Tensor, source: torch.Tensor, packed: _HostCopy) -> None:
        """Copy while the device computes, after the work that it already has."""
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            packed.event = self._stream.record_event()

    def _wait_for(self, packed: _HostCopy) -> None:
        """Make the device wait for the end of a copy."""
        if packed.event is not None:
            torch.cuda.current_stream(self._device).wait_event(packed.event)
        if packed is self._coming:
            self._coming = None

    def _check_host(self, num_bytes: int) -> None:
        self._bytes_since_check += num_bytes
        if self._bytes_since_check < _CHECK_EVERY_BYTES:
            return
        self._bytes_since_check = 0
        available = available_host_bytes()
        if available < _CHECK_EVERY_BYTES:
            raise _no_host_memory(f"{available / MB:.0f} MiB are left")
        if available < _WARN_BELOW_BYTES:
            log_first_n(
                logging.WARNING,
                f"MEMFIT.OFFLOAD.MODULES: {available / GB:.1f} GB of the host's memory are left",
                key="message",
            )


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A value that two tensors share if they are the same tensor, unchanged."""
    return (
        tensor.data_ptr(),
        version_of(tensor),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
    )


def _no_host_memory(why: str) -> HostMemoryError:
    return HostMemoryError(
        f"MEMFIT.OFFLOAD.MODULES: no host memory for activations ({why}). Name fewer modules, "
        "lower DATALOADER.NUM_WORKERS, or use MEMFIT.CHECKPOINT.MODULES instead"
    )
