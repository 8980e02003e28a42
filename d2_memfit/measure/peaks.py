# Copyright (c) the d2_memfit developers.
"""Peaks of a device's memory: those of PyTorch's allocator on a GPU, of tensors on the CPU."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Optional

import torch

from ..common.units import GB
from ..memory import TensorMeter, cuda_context_bytes, enforce_budget, process_memory

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
    """Peaks since this was made, or since the last :meth:`take`.

    On the CPU, only tensors are counted, without those from before.
    """

    device: torch.device
    meter: Optional[TensorMeter] = None
    num_retries: int = 0

    def take(self) -> dict[str, float]:
        """Return the peaks in GB of 2^30 bytes, and reset them.

        Memory outside the allocator is what CUDA reports, including that of other processes.
        """
        if self.meter is not None:
            peak = self.meter.peak_bytes
            self.meter.peak_bytes = self.meter.live_bytes
            return {"allocated_gb": peak / GB}
        wait_for(self.device)
        stats = torch.cuda.memory_stats(self.device)
        kinds = ("allocated", "active", "reserved")
        peaks = {f"{kind}_gb": stats[f"{kind}_bytes.all.peak"] / GB for kind in kinds}
        peaks["outside_gb"] = outside_bytes(self.device) / GB
        peaks["device_gb"] = peaks["reserved_gb"] + peaks["outside_gb"]
        peaks["retries"] = stats["num_alloc_retries"] - self.num_retries
        self.num_retries = stats["num_alloc_retries"]
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
    peaks = Peaks(device)
    peaks.take()
    yield peaks


@contextmanager
def limited(device: torch.device, more_bytes: int) -> Iterator[None]:
    """While open, limit this process to ``more_bytes`` beyond what it has reserved now."""
    load_kernels(device)
    if device.type == "cpu":
        taken = process_memory().data_bytes
    else:
        torch.cuda.empty_cache()
        taken = cuda_context_bytes(device) + torch.cuda.memory_reserved(device)
    with under_budget(device, (taken + more_bytes) / GB):
        yield


@contextmanager
def under_budget(device: torch.device, budget_gb: float) -> Iterator[None]:
    """While open, limit the whole process to ``budget_gb``, as MEMFIT.BUDGET_GB does."""
    load_kernels(device)
    enforce_budget(budget_gb, str(device))
    try:
        yield
    finally:
        enforce_budget(None, str(device))


@torch.enable_grad()
def load_kernels(device: torch.device) -> None:
    """Load the kernels of cuDNN and cuBLAS, whose memory is outside the allocator."""
    x = torch.ones(1, 8, 32, 32, device=device, requires_grad=True)
    rows = torch.nn.functional.conv2d(x, x.new_ones(8, 8, 3, 3)).flatten(2)
    (rows @ x.new_ones(900, 8)).sum().backward()


def outside_bytes(device: torch.device) -> int:
    """Bytes of a GPU outside this process's allocator, including those of other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_seconds(
    run: Callable[[], Any],
    device: torch.device,
    seconds: float,
    least: int = 1,
    most: float = math.inf,
) -> float:
    """Median duration of a call, from ``least`` to ``most`` of them, until ``seconds`` are over."""
    durations: list[float] = []
    end = time.perf_counter() + seconds
    while len(durations) < least or (len(durations) < most and time.perf_counter() < end):
        wait_for(device)
        start = time.perf_counter()
        run()
        wait_for(device)
        durations.append(time.perf_counter() - start)
    return median(durations)
