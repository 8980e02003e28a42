# Copyright (c) the d2_memfit developers.
"""Memory and time of plans that are trained under their budget, and their predictions."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from detectron2.config import CfgNode

from ..config import with_settings
from ..engine import AccumulatingTrainer
from ..errors import MemfitError
from ..job import Job
from ..memory import cuda_context_bytes
from ..planner.device import DeviceModel, calibrate
from ..planner.estimates import DryJob, margin_of
from ..planner.search import plan_memory
from ..planner.writing import planned_config
from ..techniques import get_technique
from .attempt import attempt
from .compare import allocated_bytes
from .peaks import median_seconds, peaks_of, under_budget
from .scale import MASK_RCNN, Record, Scale
from .timed_steps import NO_EVALUATION, SMALL_ACTIVATIONS, Steps

__all__ = ["budget_for", "measure_plans"]

_GB = 2**30


def measure_plans(device: torch.device, scale: Scale) -> Iterator[Record]:
    """Measure plans with exact techniques for a Mask R-CNN, in float32 and in mixed precision.

    Half of an iteration's images fit into the budget at once. Times are predicted twice: with the
    device file that a user gets, and with the speeds of this card.
    """
    model = DeviceModel.choose(None, str(device))
    cfg, budget_gb = _job(model, device, scale)
    own_speeds = DeviceModel(name="this card", **calibrate(device, scale.seconds / 5))
    mixed = with_settings(cfg, get_technique("MixedPrecision").enabling_settings(cfg))
    for precision, of_precision in (("float32", cfg), ("mixed", mixed)):
        run = partial(_run_plan, of_precision, budget_gb, model, own_speeds, device, scale)
        yield {"precision": precision, "budget_gb": budget_gb, **attempt(run, device)}


def budget_for(job: Job, device: DeviceModel) -> float:
    """Smallest budget, in GB, into which the job's micro-batches fit."""
    dry_job = DryJob(job, device, evaluates=False)
    return round(dry_job.total_bytes() / _GB / (1 - margin_of(job)) + 0.02, 2)


def _job(model: DeviceModel, device: torch.device, scale: Scale) -> tuple[CfgNode, float]:
    """Choose the largest batch that fits, so that the GPU does not wait for the CPU."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2**50
    for num_images in (8, 2, 1)[-1 if scale.case else 0 :]:
        opts = ["SOLVER.IMS_PER_BATCH", 2 * num_images, *NO_EVALUATION, *SMALL_ACTIVATIONS]
        cfg = scale.cfg(MASK_RCNN, device, *opts)
        half = with_settings(cfg, {"MEMFIT.MICRO_BATCH": num_images})
        job = Job.from_cfg(half, 1, batch=scale.case)
        budget_gb = budget_for(job, model)
        if budget_gb * _GB < free:
            return cfg, budget_gb
    raise MemfitError(f"{budget_gb:.2f} GB are needed, and {free / _GB:.2f} GB are free")


def _run_plan(
    cfg: CfgNode,
    budget_gb: float,
    model: DeviceModel,
    own_speeds: DeviceModel,
    device: torch.device,
    scale: Scale,
) -> Record:
    options: Any = {"device": model, "batch": scale.case, "evaluates": False}
    plan = plan_memory(cfg, budget_gb, allow=["exact"], **options)
    if not plan.fits:
        raise MemfitError(f"no plan fits; the smallest budget is {plan.smallest_budget_gb:.2f} GB")
    job = Job.from_cfg(planned_config(cfg, plan), 1, batch=scale.case)
    dry_job = DryJob(job, model, evaluates=False)
    use = dry_job.training_use(dry_job.limit_bytes)
    images = job.geometry.micro_batch_sizes()[0]
    record: Record = {
        "images": job.geometry.window,
        "micro_batch": images,
        "techniques": [s.name for s in plan.steps if s.name != "smaller micro-batches"],
        "estimated_gb": allocated_bytes(dry_job.training, use, device) / _GB,
        "predicted_seconds": dry_job.seconds(),
        "predicted_by_own_speeds": DryJob(job, own_speeds, evaluates=False).seconds(),
    }
    make: Any = partial(AccumulatingTrainer, micro_batch_size=images)
    with under_budget(device, budget_gb):
        with peaks_of(device) as peaks:
            steps = Steps(job, device, make, job.geometry.window)
            steps.step()
            peaks.take()
            steps.step()
            allocated, reserved = peaks.take()
        record["gb"] = allocated / _GB
        if device.type == "cuda":
            record["device_gb"] = (reserved + cuda_context_bytes(device)) / _GB
            record["estimated_device_gb"] = use.total_bytes / _GB
        record["seconds"] = median_seconds(steps.step, device, max(scale.rounds // 2, 1))
    return record
