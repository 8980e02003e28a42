# Copyright (c) the d2_memfit developers.
"""A device with the measurements of an earlier run.

Training records its peaks (:class:`~d2_memfit.engine.hooks.peak_recorder.PeakRecorder`). The record
of a run of the same model on this device, with this software, corrects three values of the device:

- Memory outside the allocator, which replaces the context, kernels and NCCL of the device file. On
  one rank of a CPU, a context that was measured in this process stays.
- Tensors that no dry run sees: the memory that the run has allocated, compared with a dry run of
  the micro-batch that had the peak.
- Memory that the allocator reserves, in the same way, from a run without a budget.

A run that took more than its dry run raises both of these values at once. A run that took less may
not have seen its most crowded images, so it lowers them only after 1000 iterations. If the
micro-batch cannot be made again, the run is compared with the largest one, and only raises them.
"""

from dataclasses import replace
from typing import Optional

import torch

from ...common.reading import Name
from ...common.units import GB, MB
from ...config.settings import check_settings
from ...errors import ConfigError, one_line
from ...job import Job, WorstCase
from ...memory import RunRecord, device_and_software
from ..device import DeviceModel
from .dry_job import DryJob

__all__ = ["as_in_run"]

_LONG = 1000  # iterations


def as_in_run(device: DeviceModel, job: Job, run: Name, under_budget: bool) -> DeviceModel:
    """The device with values that a run on it has measured.

    Args:
        run: OUTPUT_DIR of the run.
        under_budget: whether the job will run under a budget. On the CPU, this decides how much
            freed memory the process keeps.

    Raises:
        ConfigError: the run has no record, or one that says nothing about the job.
    """
    record = RunRecord.read(run)
    if reason := _why_it_does_not_count(record, device, job, under_budget):
        raise ConfigError(f"the run in {run} says nothing about this job: {reason}")
    try:
        return _with_tensors(_with_outside(device, record), job, record)
    except (TypeError, ValueError) as e:  # somebody has changed the record
        raise ConfigError(f"the run in {run} cannot be compared: {one_line(e)}") from e


def _why_it_does_not_count(
    record: RunRecord, device: DeviceModel, job: Job, under_budget: bool
) -> str:
    here = _torch_device(device)
    if here is None or record.here != device_and_software(here):
        return "it had another device, or other software"
    if record.ranks != job.ranks:
        return f"it had {record.ranks} ranks, not {job.ranks}"
    if not job.family or record.family != job.family:
        return "it trained another model"
    if record.had_errors:
        return "it ran out of memory"
    has_budget = record.settings.get("MEMFIT.BUDGET_GB") is not None
    if not device.is_gpu and has_budget != under_budget:
        return "on a CPU, both must have a budget, or neither"
    return ""


def _torch_device(device: DeviceModel) -> Optional[torch.device]:
    """This machine's device, if it is the one to predict for."""
    if not device.is_gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        return None
    here = torch.device("cuda", torch.cuda.current_device())
    return here if device.is_card(torch.cuda.get_device_name(here)) else None


def _with_outside(device: DeviceModel, record: RunRecord) -> DeviceModel:
    # One of several ranks has more than this process: the threads and buffers of gloo.
    is_known = device.is_this_process and record.ranks == 1
    if is_known:
        return device
    outside_mb = record.outside_bytes / MB
    text = f"{record.outside_bytes / GB:.2f} GB outside the allocator"
    return replace(
        device,
        context_mb=outside_mb,
        context_is_measured=True,
        kernels_mb=0.0,
        nccl_mb=(0.0, 0.0),
        from_run=_line(record, text),
    )


def _with_tensors(device: DeviceModel, job: Job, record: RunRecord) -> DeviceModel:
    job = job.with_settings(record.settings)
    check_settings(job.cfg, job.ranks)
    dry_job, is_alike = _what_ran(job, device, record)
    believes_less = is_alike and record.iterations >= _LONG
    predicted = dry_job.training_use()
    more = record.allocated_bytes - predicted.allocated_bytes
    if more > 0 or believes_less:
        other_mb = max(device.other_tensors_mb + more / MB, 0.0)
        device = replace(device, other_tensors_mb=other_mb, tensors_are_measured=True)
    expands = dry_job.expandable_segments
    if device.is_gpu and job.budget_gb is None and expands == record.expandable_segments:
        use = device.use(dry_job.training, None, expands, job.ranks)
        factor = record.reserved_bytes / use.reserved_bytes
        if factor > 1 or believes_less:
            device = replace(device, reserved_factor=factor)
    text = (
        f"{record.allocated_bytes / GB:.2f} GB allocated where "
        f"{predicted.allocated_bytes / GB:.2f} GB were predicted, "
        f"{record.reserved_bytes / GB:.2f} GB reserved, "
        f"{record.outside_bytes / GB:.2f} GB outside the allocator"
    )
    return replace(device, from_run=_line(record, text))


def _what_ran(job: Job, device: DeviceModel, record: RunRecord) -> tuple[DryJob, bool]:
    """A dry run of the micro-batch that had the peak; or of the largest one, and False."""
    num_images, height, width, num_objects = record.micro_batch
    if num_images and num_images == job.geometry.largest_micro_batch:
        case = WorstCase((height, width), max(round(num_objects / num_images), 1))
        try:
            dry_job = DryJob(job.with_batch(case), device, evaluates=False)
        except ConfigError:  # its mapper cannot make one, or it has none
            pass
        else:
            if dry_job.image_size == (height, width):
                return dry_job, True
    return DryJob(job, device, evaluates=False), False


def _line(record: RunRecord, text: str) -> str:
    when = f"{record.date[:16]} UTC, {record.iterations} iterations"
    return f"Starts from a run here on {when}: {text}"
