# Copyright (c) the d2_memfit developers.
"""A hook that records the peaks of a run, from which later plans can start."""

import logging
from datetime import datetime, timezone
from typing import Any, Optional

import torch
from detectron2.config import CfgNode
from torch import nn

from .. import memory
from ..common.checks import value_of
from ..common.files import is_local
from ..common.units import GB
from ..config import default_keys, keys_of
from ..job import Job, padded_area, size_of
from .hooks import MemoryHook
from .window import count_objects

__all__ = ["PeakRecorder", "settings_of"]

logger = logging.getLogger(__name__)

_FEWEST = 3  # iterations after which optimizer states and kernels exist


class PeakRecorder(MemoryHook):
    """Records the peaks of training, when it ends, with the micro-batch that had them.

    They are written to OUTPUT_DIR/memfit_peaks.json, from which later plans can start. Runs of
    fewer than 3 iterations are not recorded. Evaluations are not included.

    Register it on the main process, before hooks that evaluate. It does not affect training: it
    reads counters of the device after each step, and sizes of images in each forward.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._before = 0  # peak allocated, before the step
        self._peaks = 0, 0  # allocated, reserved
        self._outside: Optional[int] = 0
        self._had_errors = False
        self._micro_batch = self._peak_micro_batch = (0, 0, 0, 0)

    def before_train(self) -> None:
        super().before_train()
        self._inner.out_of_memory_observers.append(self._note_error)
        if self._device.type != "cuda":
            states = memory.optimizer_states(self._inner.optimizer)
            tensors = [*self._model.parameters(), *self._model.buffers(), *states]
            of_model = {s.data_ptr(): s.nbytes() for s in memory.storages(tensors)}
            self._outside = memory.process_memory().data_bytes - sum(of_model.values())

    def _note_error(self) -> None:
        self._had_errors = True

    def before_step(self) -> None:
        self._micro_batch = 0, 0, 0, 0
        self._before = memory.device_memory(self._device).peak_allocated_bytes

    def after_forward(self, model: nn.Module, args: tuple[Any, ...], *_: Any) -> None:
        if model.training and args:
            self._micro_batch = max(self._micro_batch, _shape(args[0]), key=_need)

    def after_step(self) -> None:
        is_gpu = self._device.type == "cuda"
        now = memory.device_memory(self._device)
        peak = now.peak_allocated_bytes
        if peak <= self._before + (0 if is_gpu else memory.PEAK_LAG_BYTES):
            return
        self._peak_micro_batch = self._micro_batch
        if not is_gpu:
            assert self._outside is not None  # it is known of a process
            private = now.reserved_bytes + peak - now.allocated_bytes  # stacks of threads too
            self._peaks = (private - self._outside,) * 2
            return
        self._peaks = peak, now.peak_reserved_bytes
        free, total = torch.cuda.mem_get_info(self._device)
        taken = total - free - now.reserved_bytes
        if taken > memory.cuda_context_bytes(self._device):  # other processes use the GPU
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
            self._log()
            if is_local(folder):
                self._record(iterations).write(folder)
        except Exception as e:  # no run ends for its record
            reason = getattr(e, "strerror", None) or e
            logger.warning("The peaks of this run cannot be kept in %s (%s)", folder, reason)

    def _record(self, iterations: int) -> memory.RunRecord:
        return memory.RunRecord(
            date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S"),
            here=memory.device_and_software(self._device),
            ranks=self._job.ranks,
            family=self._job.family,
            settings=settings_of(self._job.cfg),
            iterations=iterations,
            micro_batch=self._peak_micro_batch,
            had_errors=self._had_errors,
            allocated_bytes=self._peaks[0],
            reserved_bytes=self._peaks[1],
            outside_bytes=self._outside,
            expandable_segments=memory.segments_expand(self._job.budget_gb is not None),
        )

    def _log(self) -> None:
        outside = "an unknown number of" if self._outside is None else f"{self._outside / GB:.2f}"
        logger.info(
            "Peaks of training: %.2f GB allocated, %.2f GB reserved, %s GB outside the allocator",
            *(peak / GB for peak in self._peaks),
            outside,
        )
        if predicted := self._job.cfg.MEMFIT.PLAN.PREDICTED_GB:
            text = "The plan predicted %.2f, %.2f and %.2f GB for its largest images"
            logger.info(text, *predicted)


def _shape(batch: Any) -> tuple[int, int, int, int]:
    """Images, height and width to which they are padded, and objects in all of them."""
    images = batch if isinstance(batch, (list, tuple)) else [batch]
    dicts = [image for image in images if isinstance(image, dict)]
    return len(dicts), *size_of(dicts), count_objects(dicts)


def _need(shape: tuple[int, int, int, int]) -> tuple[int, int]:
    return shape[0] * padded_area((shape[1], shape[2])), shape[3]


def settings_of(cfg: CfgNode) -> dict[str, Any]:
    """Values of the keys that decide how much memory a model takes."""
    others = ("MEMFIT.PLAN.", "MEMFIT.MONITOR.", "MEMFIT.PRESET")
    keys = ["SOLVER.IMS_PER_BATCH", "SOLVER.AMP.ENABLED", *keys_of(default_keys())]
    values = {key: value_of(cfg, key) for key in keys if not key.startswith(others)}
    return {key: value for key, value in values.items() if not isinstance(value, CfgNode)}
