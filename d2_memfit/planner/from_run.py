# Copyright (c) the d2_memfit developers.
"""A device with the measurements of an earlier run on it.

Training records its peaks (:class:`~d2_memfit.engine.hooks.PeakRecorder`), and the plan
that it was started with has its predictions. The differences correct the device.
"""

from dataclasses import replace

import torch

from ..common import GB, MB
from ..common.errors import ConfigError
from ..common.files import Name
from ..job import Job
from ..memory import RunRecord, device_and_software
from .device import DeviceModel

__all__ = ["as_in_run"]

_LONG = 1000  # iterations after which a run that took less is believed


def as_in_run(device: DeviceModel, job: Job, run: Name) -> DeviceModel:
    """The device with what a run on it took outside the allocator, and beside its plan's tensors.

    A run that took less than its plan may not have seen its most crowded images, so it counts only
    after 1000 iterations.

    Args:
        run: OUTPUT_DIR of a run of the same model with a plan's config.

    Raises:
        ConfigError: the run has no record, or one that says nothing about the job.
    """
    record, on_gpu = RunRecord.read(run), device.is_gpu and torch.cuda.is_available()
    here = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    is_here = device.description == DeviceModel.choose(None, str(here)).description
    is_here = is_here and record.here == device_and_software(here)
    for counts, reason in (
        (is_here, "it had another device, or other software"),
        (record.ranks == job.ranks, f"it had {record.ranks} ranks, not {job.ranks}"),
        (job.family and record.family == job.family, "it trained another model"),
        (not record.had_errors, "it ran out of memory"),
        (record.predicted_gb, "its config has no plan: plan once, then train that"),
    ):
        if not counts:
            raise ConfigError(f"--run {run} says nothing about this job: {reason}")
    allocated_gb = record.predicted_gb[0]
    more_mb = (record.allocated_bytes - allocated_gb * GB) / MB
    if more_mb > 0 or record.iterations >= _LONG:
        more_mb = max(device.other_tensors_mb + more_mb, 0.0)
        device = replace(device, other_tensors_mb=more_mb, tensors_are_measured=True)
    line = (
        f"Starts from a run here on {record.date[:16]} UTC, {record.iterations} iterations: "
        f"{record.allocated_bytes / GB:.2f} GB allocated where {allocated_gb:.2f} GB were "
        f"predicted, {record.outside_bytes / GB:.2f} GB outside the allocator"
    )
    device = replace(device, context_mb=record.outside_bytes / MB, context_is_measured=True)
    return replace(device, kernels_mb=0.0, nccl_mb=(0.0, 0.0), from_run=line)
