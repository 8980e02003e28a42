# Copyright (c) the d2_memfit developers.
"""A hook that records the peaks of a run, from which later plans can start."""

import logging
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, Optional

import torch
from detectron2.config import CfgNode
from torch import nn

from ...common.checks import value_of
from ...common.files import is_local
from ...common.units import GB
from ...config import default_keys, keys_of
from ...job import Job, padded_area, size_of
from ...memory import (
    PEAK_LAG_BYTES,
    RunRecord,
    cuda_context_bytes,
    device_and_software,
    device_memory,
    optimizer_states,
    process_memory,
    segments_expand,
    storages,
)
from ..window import count_objects
from .memory_hook import MemoryHook

__all__ = ["PeakRecorder", "settings_of"]

logger = logging.getLogger(__name__)

_FEWEST = 3  # iterations after which optimizer states and kernels exist


class PeakRecorder(MemoryHook):
    """Records the peaks of training, when it ends, with the micro-batch that had them.

    They are written to OUTPUT_DIR/memfit_peaks.json. Runs of fewer than 3 iterations are not
    recorded. Evaluations are not included.

    Register it on the main process, before hooks that evaluate. It does not affect training: it
    reads counters of the device after each step, and sizes of images in each forward.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._is_gpu = False
        self._before = 0  # peak allocated, before the step
        self._peaks = 0, 0
        self._outside: Optional[int] = 0
        self._had_errors = False
        self._micro_batch = 0, 0, 0, 0
        self._peak_micro_batch = 0, 0, 0, 0

    def before_train(self) -> None:
        super().before_train()
        self._inner.out_of_memory_observers.append(self._note_error)
        self._is_gpu = self._device.type == "cuda"
        if not self._is_gpu:
            self._outside = process_memory().data_bytes - self._state_bytes()

    def _state_bytes(self) -> int:
        states = optimizer_states(self._inner.optimizer)
        tensors = [*self._model.parameters(), *self._model.buffers(), *states]
        return sum({s.data_ptr(): s.nbytes() for s in storages(tensors)}.values())

    def _note_error(self) -> None:
        self._had_errors = True

    def before_step(self) -> None:
        self._micro_batch = 0, 0, 0, 0
        self._before = device_memory(self._device).peak_allocated_bytes

    def after_forward(self, model: nn.Module, args: tuple[Any, ...], *_: Any) -> None:
        if model.training and args:
            seen = _shape(args[0])
            self._micro_batch = max(self._micro_batch, seen, key=_need)

    def after_step(self) -> None:
        memory = device_memory(self._device)
        peak = memory.peak_allocated_bytes
        if peak <= self._before + (0 if self._is_gpu else PEAK_LAG_BYTES):
            return
        self._peak_micro_batch = self._micro_batch
        if self._is_gpu:
            self._peaks = peak, memory.peak_reserved_bytes
            self._look_outside()
        else:
            assert self._outside is not None  # it is known of a process
            now = process_memory()
            private = now.data_bytes + peak - now.resident_bytes  # stacks of threads too
            self._peaks = (private - self._outside,) * 2

    def _look_outside(self) -> None:
        free, total = torch.cuda.mem_get_info(self._device)
        taken = total - free - torch.cuda.memory_reserved(self._device)
        if taken > cuda_context_bytes(self._device):  # other processes use the GPU
            self._outside = None
        elif self._outside is not None:
            self._outside = max(self._outside, taken)

    def after_train(self) -> None:
        super().after_train()
        if self._forward_hook is None or not self._peaks[0]:
            return
        iterations = self.trainer.iter - self.trainer.start_iter
        if iterations < _FEWEST:
            return
        folder = self._job.cfg.OUTPUT_DIR
        try:
            record = self._record(iterations)
            _log(record)
            if is_local(folder):
                record.write(folder)
        except Exception as e:  # no run ends for its record
            reason = getattr(e, "strerror", None) or e
            logger.warning("The peaks of this run cannot be kept in %s (%s)", folder, reason)

    def _record(self, iterations: int) -> RunRecord:
        return RunRecord(
            date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S"),
            here=device_and_software(self._device),
            ranks=self._job.ranks,
            family=self._job.family,
            settings=settings_of(self._job.cfg),
            iterations=iterations,
            micro_batch=self._peak_micro_batch,
            had_errors=self._had_errors,
            allocated_bytes=self._peaks[0],
            reserved_bytes=self._peaks[1],
            outside_bytes=self._outside,
            expandable_segments=segments_expand(under_budget=self._job.budget_gb is not None),
            predicted_gb=list(self._job.cfg.MEMFIT.PLAN.PREDICTED_GB),
        )


def _log(record: RunRecord) -> None:
    outside = "an unknown number of"
    if record.outside_bytes is not None:
        outside = f"{record.outside_bytes / GB:.2f}"
    logger.info(
        "Peaks of training: %.2f GB allocated, %.2f GB reserved, %s GB outside the allocator",
        record.allocated_bytes / GB,
        record.reserved_bytes / GB,
        outside,
    )
    if record.predicted_gb:
        logger.info(
            "The plan predicted %.2f, %.2f and %.2f GB for its largest images",
            *record.predicted_gb,
        )


def _shape(batch: Any) -> tuple[int, int, int, int]:
    """Images, height and width to which they are padded, and objects in all of them."""
    images = batch if isinstance(batch, (list, tuple)) else [batch]
    dicts = [image for image in images if isinstance(image, dict)]
    return len(dicts), *size_of(dicts), count_objects(dicts)


def _need(shape: tuple[int, int, int, int]) -> tuple[int, int]:
    return shape[0] * padded_area((shape[1], shape[2])), shape[3]


def settings_of(cfg: CfgNode) -> dict[str, Any]:
    """Values of the keys that decide how much memory a model takes."""
    keys = ["SOLVER.IMS_PER_BATCH", "SOLVER.AMP.ENABLED", *keys_of(default_keys())]
    values = {key: value_of(cfg, key) for key in keys}
    others = ("MEMFIT.PLAN.", "MEMFIT.MONITOR.", "MEMFIT.PRESET")
    return {
        key: list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
        for key, value in values.items()
        if not isinstance(value, CfgNode) and not key.startswith(others)
    }
