# Copyright (c) the d2_memfit developers.
"""A device with the measurements of an earlier run on it.

Training records its peaks (:class:`~d2_memfit.engine.hooks.PeakRecorder`), and the plan
that it was started with has its predictions. The differences correct the device.
"""

from dataclasses import replace
from typing import Optional

import torch

from ..common import GB, MB
from ..common.errors import ConfigError
from ..common.files import Name
from ..config.cards import find_card
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
    record, here = RunRecord.read(run), _torch_device(device)
    is_here = here is not None and record.here == device_and_software(here)
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
        device = replace(
            device,
            other_tensors_mb=max(device.other_tensors_mb + more_mb, 0.0),
            tensors_are_measured=True,
        )
    device = replace(
        device,
        context_mb=record.outside_bytes / MB,
        context_is_measured=True,
        kernels_mb=0.0,
        nccl_mb=(0.0, 0.0),
    )
    line = (
        f"Starts from a run here on {record.date[:16]} UTC, {record.iterations} iterations: "
        f"{record.allocated_bytes / GB:.2f} GB allocated where {allocated_gb:.2f} GB were "
        f"predicted, {record.outside_bytes / GB:.2f} GB outside the allocator"
    )
    return replace(device, from_run=line)


def _torch_device(device: DeviceModel) -> Optional[torch.device]:
    """This machine's device, if it is the one to predict for."""
    if not device.is_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        return None
    here = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(here)
    card = find_card(name)
    is_here = card.device == device.name if card else device.description.startswith(name)
    return here if is_here else None
