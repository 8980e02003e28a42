# Copyright (c) the d2_memfit developers.
"""Training steps of a job: their memory and time, measured and expected."""

from collections.abc import Callable
from itertools import repeat
from typing import Any, Optional

import torch
from detectron2.utils.events import EventStorage

from ..engine import AccumulatingTrainer
from ..job import Job
from ..planner.device import DeviceUse
from ..planner.dry_run import Timeline, worst_proposals
from ..planner.estimates import DryJob, build_with_values
from .injection import seed_all
from .peaks import median_seconds, outside_bytes, peaks_of
from .scale import Record

__all__ = ["Steps", "allocated_bytes", "compared", "measured_steps"]

_GB = 2**30


class Steps:
    """Steps of a trainer with random pixels and constant weights.

    Weights are random: with zeros a GPU would need less power, and be faster.

    Args:
        job: of :meth:`Scale.step_cfg`, so that nothing overflows.
        make: called with a model, a loader and an optimizer, and a precision if it is not float32.
        batch: dataset dicts; None is one micro-batch of the job's largest images.
    """

    def __init__(
        self,
        job: Job,
        device: torch.device,
        make: Callable[..., Any] = AccumulatingTrainer,
        batch: Optional[list[dict[str, Any]]] = None,
    ) -> None:
        seed_all()
        model, optimizer = build_with_values(job, str(device))
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        precision = job.precision(str(device))
        if precision.scaler is not None:  # the first steps must not be left out
            precision.scaler = torch.amp.GradScaler(precision.device_type, init_scale=1.0)
        options = {} if precision.dtype == torch.float32 else {"precision": precision}
        images = job.training_batch() if batch is None else batch
        pixels = [torch.randint(0, 256, d["image"].shape, dtype=torch.uint8) for d in images]
        images = [{**d, "image": image} for d, image in zip(images, pixels)]
        self.trainer = make(model, repeat(images), optimizer, **options)
        self._num_steps = 0

    def step(self) -> None:
        with EventStorage(), worst_proposals(self.trainer.model, lambda line: None):
            self.trainer.iter = self._num_steps
            self.trainer.run_step()
        self._num_steps += 1


def measured_steps(
    dry_job: DryJob,
    device: torch.device,
    rounds: int,
    make: Callable[..., Any] = AccumulatingTrainer,
    batch: Optional[list[dict[str, Any]]] = None,
) -> Record:
    """Measure the memory and the time of a job's steps, in addition to what is expected of them.

    Args:
        rounds: repetitions of the timing.
        make, batch: see :class:`Steps`.
    """
    use = dry_job.training_use(dry_job.limit_bytes)
    with peaks_of(device) as peaks:
        steps = Steps(dry_job.job, device, make, batch)
        steps.step()
        peaks.take()
        steps.step()
        allocated, reserved = peaks.take()
    record = {
        "gb": allocated / _GB,
        "estimated_gb": allocated_bytes(dry_job.training, use, device) / _GB,
        "reserved_gb": reserved / _GB,
        "seconds": median_seconds(steps.step, device, rounds),
        "predicted_seconds": dry_job.seconds(),
    }
    if device.type == "cuda":
        record["device_gb"] = (reserved + outside_bytes(device)) / _GB
        record["estimated_device_gb"] = use.total_bytes / _GB
    return record


def compared(record: Record, plain: Record) -> Record:
    """The record with its times over those of another one, if both were measured."""
    if "seconds" not in record or "seconds" not in plain:
        return record
    return {
        **record,
        "time_factor": record["seconds"] / plain["seconds"],
        "predicted_time_factor": record["predicted_seconds"] / plain["predicted_seconds"],
    }


def allocated_bytes(timeline: Optional[Timeline], use: DeviceUse, device: torch.device) -> int:
    """Estimated bytes that :func:`peaks_of` measures: only tensors on the CPU."""
    assert timeline is not None
    return use.allocated_bytes if device.type == "cuda" else sum(timeline.peak().values())
