# Copyright (c) the d2_memfit developers.
"""Hooks that watch the memory of a run."""

import json
import logging
import os
import statistics
from collections import Counter
from datetime import datetime, timezone
from multiprocessing import active_children
from typing import Any, Optional

import torch
from detectron2.engine import HookBase
from detectron2.utils import comm
from detectron2.utils.file_io import PathManager

from .. import memory
from ..common import GB, MB, compat
from ..common.compat import dump_memory_snapshot, record_memory_history
from ..common.files import is_local
from ..job import Job

logger = logging.getLogger(__name__)

# EnforceBudget: the first iterations load kernels, cuBLAS handles and NCCL buffers.
_FIRST_ITERATIONS = 10
_ENFORCE_PERIOD = 100  # iterations
# LeakDetector: growth that counts, per iteration, and parts of a window.
_LEAST_MB = 2**-7
_NUM_BLOCKS = 20
# MemorySnapshot: files of a run, tensors in each, and entries of the allocator, some 100 MB.
_MOST_SNAPSHOTS = 3
_MOST_TENSORS = 50
_MOST_HISTORY = 100_000
_FEWEST = 3  # PeakRecorder: iterations after which optimizer states and kernels exist


class MemoryHook(HookBase):
    """A hook that knows the model and its device, and runs after each forward, too."""

    _inner: Any = None  # the trainer that has model and optimizer, once training has begun

    def before_train(self) -> None:
        self._inner = compat.inner_trainer(self.trainer)
        self._model = compat.without_ddp(self._inner.model)
        self._device = next(self._model.parameters()).device
        self._forward_hook = self._model.register_forward_hook(self.after_forward)

    def after_train(self) -> None:
        if self._inner is not None:  # an error may come before this hook's before_train
            self._forward_hook.remove()

    def after_forward(self, model: Any, args: tuple[Any, ...], output: Any) -> None:
        """Called as a forward hook of the model, which has no DDP around it."""


class EnforceBudget(MemoryHook):
    """Lowers the limit of a GPU's allocator as memory outside it grows.

    The limit set at the start cannot include kernels and buffers that are loaded at first use. This
    memory is measured after each forward of the first 10 iterations, then of every 100th.

    Args:
        budget_gb, device: as for :func:`~d2_memfit.memory.enforce_budget`.
    """

    def __init__(self, budget_gb: float, device: str) -> None:
        self._budget = budget_gb, device

    def after_forward(self, *_: Any) -> None:
        done = self.trainer.iter - self.trainer.start_iter
        if done < _FIRST_ITERATIONS or done % _ENFORCE_PERIOD == 0:
            memory.enforce_budget(*self._budget)


class MemoryMonitor(MemoryHook):
    """Reports the memory of all ranks to the event storage and the log.

    Every ``period`` iterations the storage gets these values, in GB (2^30 bytes) if they end in
    ``_gb``:

    - ``memfit/allocated_gb``, ``memfit/reserved_gb``, and ``memfit/allocated_peak_gb``,
      ``memfit/reserved_peak_gb``, their peaks since the last report;
    - ``memfit/host_rss_gb``, the trainer's RAM on the host; ``memfit/workers_rss_gb``, that of its
      loader's workers, and ``memfit/workers_private_gb``, without files and shared memory;
    - ``memfit/alloc_retries``: total number of allocation retries, on a GPU.

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
        self._period, self._budget_gb = period, budget_gb
        self._seen = [0, 0]  # most bytes since the last report: allocated, reserved

    def before_train(self) -> None:
        super().before_train()
        now = memory.device_memory(self._device)
        self._peaks = now.peak_allocated_bytes, now.peak_reserved_bytes

    def after_step(self) -> None:
        self.after_forward()
        if (self.trainer.iter + 1) % self._period and self.trainer.iter + 1 < self.trainer.max_iter:
            return
        now = memory.device_memory(self._device)
        workers = [memory.process_memory(worker.pid) for worker in active_children()]
        own = {
            "allocated_gb": now.allocated_bytes / GB,
            "reserved_gb": now.reserved_bytes / GB,
            "allocated_peak_gb": self._seen[0] / GB,
            "reserved_peak_gb": self._seen[1] / GB,
            "host_rss_gb": memory.process_memory().resident_bytes / GB,
            "workers_rss_gb": sum(w.resident_bytes for w in workers) / GB,
            "workers_private_gb": sum(w.anonymous_bytes for w in workers) / GB,
        }
        if self._device.type == "cuda":
            own["alloc_retries"] = torch.cuda.memory_stats(self._device)["num_alloc_retries"]
        self._seen = [0, 0]
        ranks = comm.gather(own)
        if not comm.is_main_process():
            return
        values = {f"memfit/{name}": max(rank[name] for rank in ranks) for name in own}
        if len(ranks) > 1:
            for name in own:
                values[f"memfit/{name}_min"] = min(rank[name] for rank in ranks)
                values[f"memfit/{name}_mean"] = statistics.mean(rank[name] for rank in ranks)
        self.trainer.storage.put_scalars(smoothing_hint=False, **values)
        used, budget = values["memfit/reserved_peak_gb"], self._budget_gb
        text = f"{used:.1f}/{budget:.1f}" if budget else f"{used:.1f}"
        logger.info("Memory until iteration %d: %s GB", self.trainer.iter, text)

    def after_forward(self, *_: Any) -> None:
        now = memory.device_memory(self._device)
        used = now.allocated_bytes, now.reserved_bytes
        peaks = now.peak_allocated_bytes, now.peak_reserved_bytes
        for i, before in enumerate(self._peaks):
            has_risen = peaks[i] > before + memory.PEAK_LAG_BYTES
            self._seen[i] = max(self._seen[i], peaks[i] if has_risen else used[i])
        self._peaks = peaks


class LeakDetector(MemoryHook):
    """Warns once for each kind of memory that grows steadily, and names the tensors that grow.

    It measures after each iteration: tensors on a GPU, the RAM of the process without files, and
    that of the loader's workers.

    Args:
        window: iterations over which memory must grow.
        skip: iterations at the beginning, which fill caches.
    """

    def __init__(self, window: int = 400, skip: int = 50) -> None:
        self._window, self._skip = window, skip
        self._used: dict[str, list[float]] = {}  # MB by kind, after each iteration of this window
        self._said: set[str] = set()
        self._tensors: Counter[Any] = Counter()  # when the window began

    def after_step(self) -> None:
        if self.trainer.iter - self.trainer.start_iter < self._skip:
            return
        if not self._used:
            memory.release_memory(self._device)
            self._tensors = memory.live_tensors(self._model, self._inner.optimizer)
        for kind, used in self._measure().items():
            series = self._used.setdefault(kind, [])
            series.append(used)
            if len(series) == self._window:
                self._warn(kind, series)
                del self._used[kind]

    def _measure(self) -> dict[str, float]:
        own = memory.process_memory().anonymous_bytes
        workers = sum(memory.process_memory(w.pid).anonymous_bytes for w in active_children())
        used = {"memory in use on cpu": own, "memory of the data loader's workers": workers}
        if self._device.type == "cuda":
            used[f"memory in use on {self._device}"] = torch.cuda.memory_allocated(self._device)
        return {kind: num_bytes / MB for kind, num_bytes in used.items()}

    def _warn(self, kind: str, used: list[float]) -> None:
        least = self._window * _LEAST_MB
        if kind in self._said or not rises_steadily(used, least):
            return
        memory.release_memory(self._device)
        growth = self._measure()[kind] - used[0]
        if growth < least:
            return
        self._said.add(kind)
        tensors = memory.live_tensors(self._model, self._inner.optimizer) - self._tensors
        largest = [f"{name} ({size / MB:.1f} MB)" for (_, name), size in tensors.most_common(3)]
        text = "The %s grows by %.1f MB per 1000 iterations, over the last %d. Growing tensors: %s"
        rate = growth * 1000 / self._window
        logger.warning(text, kind, rate, self._window, ", ".join(largest) or "none")


def rises_steadily(values: list[float], at_least: float) -> bool:
    """Whether a series rises from its beginning to its end.

    Each of 20 blocks is represented by its minimum, which large images do not raise. Two things
    rise and are not steady: caches, which stop when they are full, and steps, such as those of
    evaluations, between which nothing rises.

    Args:
        values: one for each step, at least 20.
        at_least: smallest rise over the whole series that counts.
    """
    bounds = [i * len(values) // _NUM_BLOCKS for i in range(_NUM_BLOCKS + 1)]
    blocks = [min(values[a:b]) for a, b in zip(bounds, bounds[1:])]
    rises = [b - a for a, b in zip(blocks, blocks[1:])]
    growth = blocks[-1] - blocks[0]
    return (
        growth >= at_least
        and sum(rise > 0 for rise in rises) >= 0.7 * len(rises)
        and statistics.median(rises) > growth / (2 * len(rises))
        and blocks[-1] - blocks[-1 - _NUM_BLOCKS // 4] > growth / 8
    )


class MemorySnapshot(MemoryHook):
    """Writes the owners of the memory to files at the first three out-of-memory errors.

    ``memfit_oom_<number>.json`` has the bytes of each owner that Python can see, and the largest
    tensors. On a GPU, a ``.pickle`` with it is for https://docs.pytorch.org/memory_viz.

    Args:
        output_dir: a folder of this rank.
    """

    def __init__(self, output_dir: str) -> None:
        self._output_dir = output_dir
        self._num_written = 0

    def before_train(self) -> None:
        super().before_train()
        self._inner.out_of_memory_observers.append(self._write)
        if self._device.type == "cuda":
            record_memory_history(_MOST_HISTORY)

    def after_train(self) -> None:
        super().after_train()
        if self._inner is not None:
            self._inner.out_of_memory_observers.remove(self._write)
            if self._device.type == "cuda":
                record_memory_history(0)

    def _write(self) -> None:
        if self._num_written == _MOST_SNAPSHOTS:
            return
        self._num_written += 1
        total = memory.device_memory(self._device).allocated_bytes
        sizes = memory.live_tensors(self._model, self._inner.optimizer, self._device)
        owners = Counter({"other": max(total - sum(sizes.values()), 0)})
        for (owner, _), size in sizes.items():
            owners[owner] += size
        snapshot = {
            "iteration": self.trainer.iter,
            "device": str(self._device),
            "total_bytes": total,
            "owners": dict((+owners).most_common()),
            "tensors": [
                {"owner": owner, "kind": kind, "bytes": size}
                for (owner, kind), size in sizes.most_common(_MOST_TENSORS)
            ],
        }
        path = os.path.join(self._output_dir, f"memfit_oom_{self._num_written}")
        PathManager.mkdirs(self._output_dir)
        with PathManager.open(f"{path}.json", "w") as f:
            json.dump(snapshot, f, indent=1)
        if self._device.type == "cuda":
            dump_memory_snapshot(f"{path}.pickle")
        logger.info("The owners of the memory are in %s.json", path)


class PeakRecorder(MemoryHook):
    """Records the peaks of training when it ends.

    They are written to OUTPUT_DIR/memfit_peaks.json, from which later plans can start. Runs of
    fewer than 3 iterations are not recorded. Evaluations are not included.

    Register it on the main process, before hooks that evaluate. It does not affect training: it
    reads counters of the device before and after each step.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._before = self._outside = 0  # peak allocated, before the step; bytes outside of it
        self._peaks = 0, 0  # allocated, reserved
        self._had_errors = False

    def before_train(self) -> None:
        super().before_train()
        self._inner.out_of_memory_observers.append(lambda: setattr(self, "_had_errors", True))
        if self._device.type != "cuda":
            of_model = sum(t.nbytes for t in [*self._model.parameters(), *self._model.buffers()])
            self._outside = memory.process_memory().data_bytes - of_model

    def before_step(self) -> None:
        self._before = memory.device_memory(self._device).peak_allocated_bytes

    def after_step(self) -> None:
        now = memory.device_memory(self._device)
        peak = now.peak_allocated_bytes
        if peak <= self._before + memory.PEAK_LAG_BYTES:
            return
        if self._device.type == "cuda":
            self._peaks = peak, now.peak_reserved_bytes
            self._outside = max(self._outside, memory.cuda_context_bytes(self._device))
        else:
            private = now.reserved_bytes + peak - now.allocated_bytes  # stacks of threads too
            self._peaks = (private - self._outside,) * 2

    def after_train(self) -> None:
        super().after_train()
        folder, iterations = self._job.cfg.OUTPUT_DIR, self.trainer.iter - self.trainer.start_iter
        allocated, reserved = self._peaks
        if not allocated or iterations < _FEWEST:
            return
        text = "Peaks of training: %.2f GB allocated, %.2f GB reserved, %.2f GB outside of both"
        logger.info(text, allocated / GB, reserved / GB, self._outside / GB)
        predicted = memory.figures_of_plan(folder).get("predicted_gb", [])
        if predicted:
            text = "The plan predicted %.2f, %.2f and %.2f GB for its largest images"
            logger.info(text, *predicted)
        record = memory.RunRecord(
            date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S"),
            here=memory.device_and_software(self._device),
            ranks=self._job.ranks,
            family=self._job.family,
            predicted_gb=predicted,
            iterations=iterations,
            had_errors=self._had_errors,
            allocated_bytes=allocated,
            outside_bytes=self._outside,
        )
        try:
            if is_local(folder):
                record.write(folder)
        except OSError as e:  # no run ends for its record
            logger.warning("The peaks of this run cannot be kept in %s (%s)", folder, e)
