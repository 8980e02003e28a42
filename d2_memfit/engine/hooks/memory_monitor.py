# Copyright (c) the d2_memfit developers.
"""A hook that reports the memory of all ranks to the event storage and the console."""

import logging
import statistics
from contextlib import suppress
from typing import Any, Optional

import psutil
import torch
from detectron2.utils import comm
from detectron2.utils.events import CommonMetricPrinter

from ... import compat
from ...common.units import GB
from ...memory import PEAK_LAG_BYTES, device_memory
from .memory_hook import MemoryHook

__all__ = ["MemoryMonitor"]


class MemoryMonitor(MemoryHook):
    """Reports the memory of all ranks to the event storage, and to the console.

    Every ``period`` iterations the storage gets these values, in GB (2^30 bytes) if they end in
    ``_gb``:

    - ``memfit/allocated_gb``, ``memfit/reserved_gb``, and ``memfit/allocated_peak_gb``,
      ``memfit/reserved_peak_gb``, their peaks since the last report;
    - ``memfit/host_rss_gb``, the trainer's RAM on the host; ``memfit/workers_rss_gb``, that of its
      loader's workers, and ``memfit/workers_private_gb``, without what they share;
    - ``memfit/fragmentation``: reserved minus allocated, over reserved;
    - ``memfit/budget_used``: peak reserved over the budget;
    - ``memfit/alloc_retries``: total number of allocation retries.

    With several ranks each value is the largest; ``..._min`` and ``..._mean`` are added.

    Peak statistics are never reset. A peak since the last report is the device's own peak if that
    has risen. Otherwise it is the largest value at the end of a forward or a step.

    On the CPU, allocated is the process's RAM, and reserved is what the kernel's limit counts.

    Register it on all ranks, before the hook that writes.

    Args:
        period: iterations between reports.
        budget_gb: MEMFIT.BUDGET_GB.
    """

    def __init__(self, period: int, budget_gb: Optional[float] = None) -> None:
        self._period = period
        self._budget_gb = budget_gb
        self._column = ""
        self._seen = [0, 0]  # most bytes since the last report: allocated, reserved
        self._ever = [0, 0]

    def before_train(self) -> None:
        super().before_train()
        memory = device_memory(self._device)
        self._ever = [memory.peak_allocated_bytes, memory.peak_reserved_bytes]
        for writer in compat.writers_of(self.trainer):
            if type(writer) is CommonMetricPrinter and not hasattr(writer.logger, "extra"):
                writer.logger = _WithColumn(writer.logger, self)

    def after_step(self) -> None:
        self._look()
        if (self.trainer.iter + 1) % self._period and self.trainer.iter + 1 < self.trainer.max_iter:
            return
        ranks = comm.gather(self._values())
        if not comm.is_main_process():
            return
        for name in ranks[0]:
            values = [rank[name] for rank in ranks]
            self._put(name, max(values))
            if len(ranks) > 1:
                self._put(f"{name}_min", min(values))
                self._put(f"{name}_mean", statistics.mean(values))
        used = max(rank["reserved_peak_gb"] for rank in ranks)
        budget = f"/{self._budget_gb:.1f}" if self._budget_gb else ""
        self._column = f"mem {used:.1f}{budget} GB"

    def after_forward(self, *_: Any) -> None:
        self._look()

    def _look(self) -> None:
        memory = device_memory(self._device)
        lag = 0 if self._device.type == "cuda" else PEAK_LAG_BYTES
        now = (memory.allocated_bytes, memory.reserved_bytes)
        ever = (memory.peak_allocated_bytes, memory.peak_reserved_bytes)
        for i in range(2):
            has_risen = ever[i] > self._ever[i] + lag
            self._seen[i] = max(self._seen[i], ever[i] if has_risen else now[i])
            if has_risen or ever[i] < self._ever[i]:
                self._ever[i] = ever[i]

    def _values(self) -> dict[str, float]:
        memory = device_memory(self._device)
        report = {
            "allocated_gb": memory.allocated_bytes / GB,
            "reserved_gb": memory.reserved_bytes / GB,
            "allocated_peak_gb": self._seen[0] / GB,
            "reserved_peak_gb": self._seen[1] / GB,
            "fragmentation": 1 - memory.allocated_bytes / max(memory.reserved_bytes, 1),
        }
        if self._budget_gb:
            report["budget_used"] = report["reserved_peak_gb"] / self._budget_gb
        report["alloc_retries"] = 0
        if self._device.type == "cuda":
            report["alloc_retries"] = torch.cuda.memory_stats(self._device)["num_alloc_retries"]
        process = psutil.Process()
        report["host_rss_gb"] = process.memory_info().rss / GB
        workers = [_rss_and_private(child) for child in process.children(recursive=True)]
        report["workers_rss_gb"] = sum(rss for rss, _ in workers) / GB
        report["workers_private_gb"] = sum(private for _, private in workers) / GB
        self._seen = [0, 0]
        return report

    def _put(self, name: str, value: float) -> None:
        self.trainer.storage.put_scalar(f"memfit/{name}", value, smoothing_hint=False)


class _WithColumn(logging.LoggerAdapter):  # type: ignore[type-arg]  # it takes one from 3.11 on
    """Appends the monitor's column to the lines of Detectron2's console printer."""

    def __init__(self, original: Any, monitor: MemoryMonitor) -> None:
        super().__init__(original, {})
        self._monitor = monitor

    def process(self, message: str, kwargs: Any) -> tuple[str, Any]:
        column = self._monitor._column
        return (f"{message}  {column}" if column else message), kwargs


def _rss_and_private(process: psutil.Process) -> tuple[int, int]:
    """All RAM of a process and its unshared part; 0 if it has ended or is another user's."""
    rss = private = 0
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        rss = private = process.memory_info().rss
        private = process.memory_full_info().uss
    return rss, private
