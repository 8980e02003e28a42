# Copyright (c) the d2_memfit developers.
"""Peaks of a device's memory: those of PyTorch's allocator on a GPU, of tensors on the CPU."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional

import torch

from ..memory import TensorMeter, enforce_budget, process_memory

__all__ = [
    "Peaks",
    "limited",
    "load_kernels",
    "median_seconds",
    "outside_bytes",
    "peaks_of",
    "under_budget",
    "wait_for",
]


@dataclass
class Peaks:
    """Peaks since this was made, or since the last :meth:`take`, in bytes.

    On the CPU, tensors from before do not count, and reserved equals allocated.
    """

    device: torch.device
    meter: Optional[TensorMeter] = None

    def take(self) -> tuple[int, int]:
        """Return the allocated and reserved peaks, and reset them."""
        if self.meter is not None:
            peak, self.meter.peak_bytes = self.meter.peak_bytes, self.meter.live_bytes
            return peak, peak
        wait_for(self.device)
        peaks = (
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.max_memory_reserved(self.device),
        )
        torch.cuda.reset_peak_memory_stats(self.device)
        return peaks


@contextmanager
def peaks_of(device: torch.device) -> Iterator[Peaks]:
    if device.type == "cpu":
        with TensorMeter() as meter:
            yield Peaks(device, meter)
        return
    wait_for(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    yield Peaks(device)


@contextmanager
def limited(device: torch.device, more_bytes: int) -> Iterator[None]:
    """While open, limit this process to ``more_bytes`` beyond what it has reserved now."""
    if device.type == "cpu":
        enforce_budget((process_memory().data_bytes + more_bytes) / 2**30, "cpu")
        try:
            yield
        finally:
            enforce_budget(None, "cpu")
        return
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved(device) + more_bytes
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(allowed / total, 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@contextmanager
def under_budget(device: torch.device, budget_gb: float) -> Iterator[None]:
    """While open, limit the whole process to ``budget_gb``, as MEMFIT.BUDGET_GB does."""
    load_kernels(device)
    enforce_budget(budget_gb, str(device))
    try:
        yield
    finally:
        enforce_budget(None, str(device))


def load_kernels(device: torch.device) -> None:
    """Load the kernels of cuDNN and cuBLAS, whose memory is outside the allocator."""
    x = torch.ones(1, 8, 32, 32, device=device, requires_grad=True)
    torch.nn.functional.conv2d(x, x.new_ones(8, 8, 3, 3)).flatten(2).matmul(
        x.new_ones(900, 8)
    ).sum().backward()


def outside_bytes(device: torch.device) -> int:
    """Bytes of a GPU outside this process's allocator, those of other processes too."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(run: Callable[[], Any], device: torch.device, rounds: int) -> float:
    """Median duration of ``rounds`` calls, after one call to warm up."""
    run()
    seconds = []
    for _ in range(rounds):
        wait_for(device)
        start = time.perf_counter()
        run()
        wait_for(device)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[len(seconds) // 2]
