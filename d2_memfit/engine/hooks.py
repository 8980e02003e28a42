"""Hooks for a trainer: where memory goes over time, whether it leaks, and what holds it."""

import json
import logging
import os
import signal
import statistics
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Optional

import psutil
import torch
from detectron2.config import CfgNode
from detectron2.engine import HookBase, hooks
from detectron2.utils import comm
from detectron2.utils.events import CommonMetricPrinter
from detectron2.utils.file_io import PathManager

from .. import compat
from ..errors import ConfigError
from ..memory import (
    OwnerMeter,
    TensorCensus,
    bytes_by_kind,
    device_memory,
    holders,
    live_tensors,
    steady_growth,
    used_bytes,
)
from .train_loop import AccumulatingTrainer

__all__ = [
    "LeakDetector",
    "MemoryMonitor",
    "MemorySnapshot",
    "memory_hooks",
]

logger = logging.getLogger(__name__)

_GB = 2**30


def memory_hooks(
    monitor: CfgNode, output_dir: str, budget_gb: Optional[float] = None
) -> list[HookBase]:
    """What a node MEMFIT.MONITOR turns on. Register these before all others, on all ranks."""
    made: list[HookBase] = []
    if monitor.SNAPSHOT_ITER is not None or monitor.SNAPSHOT_ON_OOM:
        folder = output_dir if comm.is_main_process() else f"{output_dir}/rank{comm.get_rank()}"
        made.append(MemorySnapshot(folder, monitor.SNAPSHOT_ITER, monitor.SNAPSHOT_ON_OOM))
    if monitor.PERIOD is not None:
        made.append(MemoryMonitor(monitor.PERIOD, budget_gb))
    if monitor.LEAK_WINDOW is not None:
        made.append(LeakDetector(monitor.LEAK_WINDOW))
    return made


class MemoryMonitor(HookBase):
    """Reports the memory of all ranks to the event storage, and to the console.

    Every ``period`` iterations the storage gets, in GB (2^30 bytes), ``memfit/allocated_gb``,
    ``memfit/reserved_gb``, the peaks of both since the last report (``..._peak_gb``), the host's
    RAM of the trainer (``memfit/host_rss_gb``) and of its loader's workers
    (``memfit/workers_rss_gb``, and without what they share ``memfit/workers_private_gb``); and
    ``memfit/fragmentation`` (reserved minus allocated, over reserved), ``memfit/budget_used`` (peak
    reserved over the budget) and ``memfit/alloc_retries`` (a total). With several ranks each is the
    largest, and ``..._min`` and ``..._mean`` stand beside it.

    Nobody's peak statistics are reset. A peak since the last report is the device's own where that
    has risen since; otherwise it is the most that was seen at the end of a forward or a step.

    On the CPU, allocated is what the process has in RAM, and reserved what the kernel's limit
    counts.

    Register it on all ranks, before the hook that writes.

    Args:
        period: iterations between reports.
        budget_gb: MEMFIT.BUDGET_GB.
    """

    def __init__(self, period: int, budget_gb: Optional[float] = None) -> None:
        self._period = period
        self._budget_gb = budget_gb
        self._column = ""
        self._forward_hook: Any = None
        self._seen = self._ever = (0, 0)  # since the last report, and ever: allocated, reserved

    def before_train(self) -> None:
        model = compat.without_ddp(self.trainer.model)
        self._device = next(model.parameters()).device
        memory = device_memory(self._device)
        self._ever = memory.peak_allocated_bytes, memory.peak_reserved_bytes
        self._forward_hook = model.register_forward_hook(lambda *_: self._look())
        for hook in self.trainer._hooks:
            for writer in hook._writers if isinstance(hook, hooks.PeriodicWriter) else ():
                if type(writer) is CommonMetricPrinter and not hasattr(writer.logger, "extra"):
                    writer.logger = _WithColumn(writer.logger, self)

    def after_step(self) -> None:
        self._look()
        if (self.trainer.iter + 1) % self._period and self.trainer.iter + 1 < self.trainer.max_iter:
            return
        ranks = comm.gather(self._report())
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

    def after_train(self) -> None:
        if self._forward_hook is not None:
            self._forward_hook.remove()

    def _look(self) -> None:
        memory = device_memory(self._device)
        now = memory.allocated_bytes, memory.reserved_bytes
        ever = memory.peak_allocated_bytes, memory.peak_reserved_bytes
        risen = [e if e > before else 0 for e, before in zip(ever, self._ever)]
        self._seen = max(self._seen[0], now[0], risen[0]), max(self._seen[1], now[1], risen[1])
        self._ever = ever

    def _report(self) -> dict[str, float]:
        memory = device_memory(self._device)
        report = {
            "allocated_gb": memory.allocated_bytes / _GB,
            "reserved_gb": memory.reserved_bytes / _GB,
            "allocated_peak_gb": self._seen[0] / _GB,
            "reserved_peak_gb": self._seen[1] / _GB,
            "fragmentation": 1 - memory.allocated_bytes / max(memory.reserved_bytes, 1),
        }
        if self._budget_gb:
            report["budget_used"] = report["reserved_peak_gb"] / self._budget_gb
        report["alloc_retries"] = 0
        if self._device.type == "cuda":
            report["alloc_retries"] = torch.cuda.memory_stats(self._device)["num_alloc_retries"]
        process = psutil.Process()
        report["host_rss_gb"] = process.memory_info().rss / _GB
        workers = [_rss_and_private(child) for child in process.children(recursive=True)]
        report["workers_rss_gb"] = sum(rss for rss, _ in workers) / _GB
        report["workers_private_gb"] = sum(private for _, private in workers) / _GB
        self._seen = (0, 0)
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


class LeakDetector(HookBase):
    """Warns once if the memory in use after iterations grows steadily.

    The warning says how much 1000 iterations add, what kinds of tensors have come, and which of the
    model's modules or the trainer's hooks hold them. What Python cannot see, such as the graph
    behind a loss that is kept, is in the growth and not among the tensors.

    Register it on the ranks that shall look, each for itself.

    Args:
        window: iterations over which memory must grow.
        skip: iterations at the beginning, which fill caches.
        at_least_bytes: growth over the window that counts.
    """

    def __init__(self, window: int = 400, skip: int = 50, at_least_bytes: int = 2**22) -> None:
        self._window = window
        self._skip = skip
        self._at_least_bytes = at_least_bytes
        self._used: deque[int] = deque(maxlen=window)
        self._census: Optional[TensorCensus] = None
        self._has_warned = False

    def after_step(self) -> None:
        if self._has_warned:
            return
        done = self.trainer.iter + 1 - self.trainer.start_iter - self._skip
        if done <= 0:
            return
        device = next(self.trainer.model.parameters()).device
        self._used.append(used_bytes(device))
        if done % self._window == 1:
            self._census = TensorCensus()
        elif self._census is not None and done >= self._window and done % (self._window // 8) == 0:
            growth = steady_growth(list(self._used), self._at_least_bytes)
            if growth:
                self._warn(growth, self._census.newcomers())

    def _warn(self, growth: float, new: list[torch.Tensor]) -> None:
        self._has_warned = True
        owners = [(type(hook).__name__, hook) for hook in self.trainer._hooks]
        model = compat.without_ddp(self.trainer.model)
        owners += [(name or type(model).__name__, module) for name, module in model.named_modules()]
        inner: Any = getattr(self.trainer, "_trainer", self.trainer)
        owners += [("the data loader", inner.data_loader), ("the optimizer", inner.optimizer)]
        owners += [("the event storage", self.trainer.storage), ("the trainer", inner)]
        owners += [("the trainer", self.trainer)] if inner is not self.trainer else []
        logger.warning(
            "Memory in use grows by %.1f MB per 1000 iterations, and has for the last %d. Tensors "
            "that have come: %s. They are held by: %s",
            growth * 1000 / 2**20,
            len(self._used),
            _most(bytes_by_kind(new)),
            _most(holders(new, owners)),
        )


class MemorySnapshot(HookBase):
    """Writes down who has the memory: when asked to, and when it runs out.

    Files in ``output_dir``: ``memfit_memory_<iteration>.json``, the bytes of each owner at the peak
    of that iteration (see :class:`OwnerMeter`), and the largest tensors after it;
    ``memfit_oom_<number>.json``, both at an out-of-memory error, for the first three; and on a GPU,
    beside each, a ``.pickle`` for https://docs.pytorch.org/memory_viz.

    The signal SIGUSR1 asks for the next iteration.

    Args:
        output_dir: a folder of this rank.
        iteration: the one to look at; None is none.
        on_oom: whether out-of-memory errors are written down, too.
    """

    _MAX_OOMS = 3
    _MAX_ROWS = 50
    _MAX_HISTORY = 100_000  # entries of PyTorch's allocator, some 100 MB in a file

    def __init__(self, output_dir: str, iteration: Optional[int] = None, on_oom: bool = False):
        self._output_dir = output_dir
        self._iteration = iteration
        self._on_oom = on_oom
        self._num_ooms = 0
        self._is_asked_for = False
        self._meter: Optional[OwnerMeter] = None
        self._observers: list[Callable[[], None]] = []
        self._previous_handler: Any = None
        self._inner: Any = None  # the trainer that has model and optimizer

    def before_train(self) -> None:
        self._inner = getattr(self.trainer, "_trainer", self.trainer)
        self._model = compat.without_ddp(self._inner.model)
        self._device = next(self._model.parameters()).device
        if self._on_oom:
            if not isinstance(self._inner, AccumulatingTrainer):
                raise ConfigError(
                    "MemorySnapshot(on_oom=True) needs an AccumulatingTrainer, and this is a "
                    f"{self._inner.__class__.__name__}"
                )
            self._observers = self._inner.out_of_memory_observers
            self._observers.append(self._write_oom)
            self._record_history(True)
        if hasattr(signal, "SIGUSR1") and threading.current_thread() is threading.main_thread():
            self._previous_handler = signal.signal(signal.SIGUSR1, self._ask)

    def before_step(self) -> None:
        if self._is_asked_for or self.trainer.iter == self._iteration:
            self._is_asked_for = False
            self._record_history(True)
            self._meter = OwnerMeter(self._model, self._inner.optimizer).__enter__()

    def after_step(self) -> None:
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.__exit__(None, None, None)
            _, rows = live_tensors(self._model, self._inner.optimizer, self._device)
            self._write(f"memfit_memory_{self.trainer.iter}", meter.peak_bytes, meter.peak, rows)
            self._record_history(self._on_oom)

    def after_train(self) -> None:
        if self._meter is not None:  # the iteration has failed
            self._meter.__exit__(None, None, None)
        if self._previous_handler is not None:
            signal.signal(signal.SIGUSR1, self._previous_handler)
        if self._write_oom in self._observers:
            self._observers.remove(self._write_oom)
        self._record_history(False)

    def _record_history(self, is_on: bool) -> None:
        if self._device.type == "cuda" and is_on:
            torch.cuda.memory._record_memory_history(max_entries=self._MAX_HISTORY)
        elif self._device.type == "cuda":
            torch.cuda.memory._record_memory_history(enabled=None)

    def _ask(self, *_: Any) -> None:
        self._is_asked_for = True

    def _write_oom(self) -> None:
        if self._num_ooms == self._MAX_OOMS:
            return
        self._num_ooms += 1
        total = used_bytes(self._device)
        owners, rows = live_tensors(self._model, self._inner.optimizer, self._device)
        owners["other"] = max(total - sum(owners.values()), 0)
        self._write(f"memfit_oom_{self._num_ooms}", total, owners, rows)

    def _write(
        self, name: str, total: int, owners: dict[str, int], rows: list[dict[str, Any]]
    ) -> None:
        snapshot = {
            "iteration": self.trainer.iter,
            "device": str(self._device),
            "total_bytes": total,
            "owners": {k: v for k, v in sorted(owners.items(), key=lambda i: -i[1]) if v},
            "tensors": rows[: self._MAX_ROWS],
        }
        path = os.path.join(self._output_dir, name)
        PathManager.mkdirs(self._output_dir)
        with PathManager.open(f"{path}.json", "w") as f:
            json.dump(snapshot, f, indent=1)
        if self._device.type == "cuda":
            torch.cuda.memory._dump_snapshot(f"{path}.pickle")
        logger.info("Who has the memory is in %s.json", path)


def _rss_and_private(process: psutil.Process) -> tuple[int, int]:
    try:
        rss = process.memory_info().rss
        return rss, process.memory_full_info().uss
    except psutil.AccessDenied:
        return rss, rss
    except psutil.NoSuchProcess:
        return 0, 0


def _most(counts: Counter[str], num: int = 3) -> str:
    items = [f"{name} ({size / 2**20:.1f} MB)" for name, size in counts.most_common(num)]
    return ", ".join(items) or "none that Python can see"
