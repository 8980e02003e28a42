# Copyright (c) the d2_memfit developers.
"""Comparisons of estimates with the same jobs on the device, and of two models' tensors."""

from collections.abc import Mapping
from typing import Any, Optional

import torch

from ..errors import MemfitError
from ..memory import cuda_context_bytes, release_memory
from ..planner.device import DeviceUse
from ..planner.dry_run import Timeline
from ..planner.estimates import DryJob, run_for_real
from .peaks import limited, load_kernels, peaks_of
from .scale import Record, Scale

__all__ = ["allocated_bytes", "compare_preset", "compare_zoo", "relative_difference"]

_GB = 2**30


def compare_zoo(config: str, device: torch.device, scale: Scale) -> Record:
    for num_images in (2, 1):
        dry_job = scale.dry_job(scale.cfg(config, device, "SOLVER.IMS_PER_BATCH", num_images))
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2**50
        if dry_job.total_bytes() < free:
            return {"images": num_images, **_compare(dry_job, device)}
    raise MemfitError(f"one image needs {dry_job.total_bytes() / _GB:.2f} GB")


def compare_preset(config: str, device: torch.device, scale: Scale) -> Record:
    dry_job = scale.dry_job(scale.cfg(config, device))
    job = dry_job.job
    budget_bytes = int((job.budget_gb or 0) * _GB)
    record = {"budget_gb": job.budget_gb, "images": job.geometry.micro_batch_sizes()[0]}
    if device.type == "cpu":
        return {**record, **_compare(dry_job, device)}
    if budget_bytes > torch.cuda.get_device_properties(device).total_memory:
        raise MemfitError("this card is smaller")
    load_kernels(device)
    with limited(device, budget_bytes - cuda_context_bytes(device)):
        return {**record, **_compare(dry_job, device, dry_job.limit_bytes)}


def _compare(dry_job: DryJob, device: torch.device, limit_bytes: Optional[int] = None) -> Record:
    """A job's estimated and measured memory in training and evaluation."""
    uses: list[DeviceUse] = dry_job._uses(limit_bytes)
    record: Record = {"predicted_seconds": dry_job.seconds()}
    phases = (("training", dry_job.training), ("evaluation", dry_job.evaluation))
    with peaks_of(device) as peaks:
        for (phase, timeline), use, _ in zip(phases, uses, run_for_real(dry_job, str(device))):
            allocated, reserved = peaks.take()
            estimated = allocated_bytes(timeline, use, device)
            if device.type == "cuda":
                record[f"{phase}_reserved_gb"] = reserved / _GB
                record[f"{phase}_estimated_reserved_gb"] = use.reserved_bytes / _GB
                free, total = torch.cuda.mem_get_info(device)
                outside = total - free - torch.cuda.memory_reserved(device)
                record[f"{phase}_device_gb"] = (reserved + outside) / _GB
                record[f"{phase}_estimated_device_gb"] = use.total_bytes / _GB
            record[f"{phase}_gb"] = allocated / _GB
            record[f"{phase}_estimated_gb"] = estimated / _GB
            record[f"{phase}_error"] = estimated / allocated - 1
    release_memory(device)
    return record


def allocated_bytes(timeline: Optional[Timeline], use: DeviceUse, device: torch.device) -> int:
    """Estimated bytes that :func:`peaks_of` measures: only tensors on the CPU."""
    assert timeline is not None
    return use.allocated_bytes if device.type == "cuda" else sum(timeline.peak().values())


def relative_difference(
    actual: Mapping[Any, torch.Tensor], expected: Mapping[Any, torch.Tensor]
) -> float:
    """Norm of the difference of tensors with the same names over the norm of ``expected``."""
    actual_values = torch.cat([actual[name].double().flatten() for name in expected])
    expected_values = torch.cat([value.double().flatten() for value in expected.values()])
    return ((actual_values - expected_values).norm() / expected_values.norm()).item()
