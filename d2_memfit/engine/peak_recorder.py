# Copyright (c) the d2_memfit developers.
"""A hook that records the peaks of a run, from which later plans can start."""

import logging
from datetime import datetime, timezone
from typing import Any

from detectron2.config import CfgNode

from .. import memory
from ..common.checks import value_of
from ..common.files import is_local
from ..common.units import GB
from ..config import default_keys, keys_of
from ..job import Job, size_of
from .hooks import MemoryHook
from .window import count_objects, dataset_dicts

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
        self._outside = 0
        self._had_errors = False
        self._micro_batch = self._peak_micro_batch = (0, 0, 0, 0)  # images, height, width, objects

    def before_train(self) -> None:
        super().before_train()
        self._inner.out_of_memory_observers.append(self._note_error)
        if self._device.type != "cuda":
            of_model = sum(t.nbytes for t in [*self._model.parameters(), *self._model.buffers()])
            self._outside = memory.process_memory().data_bytes - of_model

    def _note_error(self) -> None:
        self._had_errors = True

    def before_step(self) -> None:
        self._micro_batch = 0, 0, 0, 0
        self._before = memory.device_memory(self._device).peak_allocated_bytes

    def after_forward(self, model: Any, args: tuple[Any, ...], output: Any) -> None:
        if model.training and args:
            images = list(dataset_dicts(args[0]))
            shape = len(images), *size_of(images), count_objects(images)
            self._micro_batch = max(self._micro_batch, shape, key=lambda s: s[0] * s[1] * s[2])

    def after_step(self) -> None:
        now = memory.device_memory(self._device)
        peak = now.peak_allocated_bytes
        if peak <= self._before + memory.PEAK_LAG_BYTES:
            return
        self._peak_micro_batch = self._micro_batch
        if self._device.type == "cuda":
            self._peaks = peak, now.peak_reserved_bytes
            self._outside = max(self._outside, memory.cuda_context_bytes(self._device))
        else:
            private = now.reserved_bytes + peak - now.allocated_bytes  # stacks of threads too
            self._peaks = (private - self._outside,) * 2

    def after_train(self) -> None:
        super().after_train()
        folder, iterations = self._job.cfg.OUTPUT_DIR, self.trainer.iter - self.trainer.start_iter
        if self._inner is None or not self._peaks[0] or iterations < _FEWEST:
            return
        allocated, reserved = self._peaks
        text = "Peaks of training: %.2f GB allocated, %.2f GB reserved, %.2f GB outside of both"
        logger.info(text, allocated / GB, reserved / GB, self._outside / GB)
        if predicted := self._job.cfg.MEMFIT.PLAN.PREDICTED_GB:
            text = "The plan predicted %.2f, %.2f and %.2f GB for its largest images"
            logger.info(text, *predicted)
        record = memory.RunRecord(
            date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S"),
            here=memory.device_and_software(self._device),
            ranks=self._job.ranks,
            family=self._job.family,
            settings=settings_of(self._job.cfg),
            iterations=iterations,
            micro_batch=self._peak_micro_batch,
            had_errors=self._had_errors,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            outside_bytes=self._outside,
            expandable_segments=memory.segments_expand(self._job.budget_gb is not None),
        )
        try:
            if is_local(folder):
                record.write(folder)
        except OSError as e:  # no run ends for its record
            logger.warning("The peaks of this run cannot be kept in %s (%s)", folder, e)


def settings_of(cfg: CfgNode) -> dict[str, Any]:
    """Values of the keys that decide how much memory a model takes."""
    others = ("MEMFIT.PLAN.", "MEMFIT.MONITOR.", "MEMFIT.PRESET")
    keys = [key for key in keys_of(default_keys()) if not key.startswith(others)]
    keys += ["SOLVER.IMS_PER_BATCH", "SOLVER.AMP.ENABLED", "MEMFIT.PLAN.PREDICTED_GB"]
    values = {key: value_of(cfg, key) for key in keys}
    return {key: value for key, value in values.items() if not isinstance(value, CfgNode)}
