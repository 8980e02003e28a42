# Copyright (c) the d2_memfit developers.
"""A plan: the least harmful changes that make a job fit a budget, and what it needs with them."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional, Union

from detectron2.config import CfgNode
from detectron2.layers import NaiveSyncBatchNorm
from omegaconf import DictConfig
from torch import nn

from ..common import GB
from ..common.checks import check_positive_number
from ..config.cards import why_no_card_has
from ..config.settings import check_arguments
from ..job import Job
from ..techniques.registry import TIERS
from .device import DeviceModel
from .estimate import DryJob, MemoryEstimate
from .ladder import Ladder, PlanStep

__all__ = ["Plan", "plan_memory"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """Changes that make a job fit, and the memory that it then needs.

    Attributes:
        budget_gb: device memory for the whole process.
        margin: headroom, as a share of the budget.
        fits: whether it leaves the margin. If not, the other fields describe the smallest allowed
            plan.
        steps: steps in the order of the ladder.
        settings: settings of all steps, and those that keep the job in its budget.
        before, estimate: estimates without and with the plan; None without, if it does not fit.
        time_factor: operations of an iteration with the plan over those without; None if something
            else decides about time, as number formats and copies to the host do.
        smallest_budget_gb: smallest budget that leaves the margin, if this one does not.
        must_allow: tiers that would have to be allowed for this budget; empty if none would help.
        obstacle: a line about what stands in the way, and what would change it; "" if it fits.
        left_out: techniques with which the job does not run, and why; a line each.
    """

    budget_gb: float
    margin: float
    fits: bool
    steps: tuple[PlanStep, ...]
    settings: dict[str, Any]
    before: Optional[MemoryEstimate]
    estimate: MemoryEstimate
    time_factor: Optional[float]
    smallest_budget_gb: Optional[float] = None
    must_allow: tuple[str, ...] = ()
    obstacle: str = ""
    left_out: tuple[str, ...] = ()

    @property
    def figures(self) -> dict[str, Any]:
        """What training compares with, as :func:`~d2_memfit.memory.figures_of_plan` says."""
        e = self.estimate
        outside = e.peak_allocated_gb + sum(e.outside.values()) - e.peak_reserved_gb
        predicted = [round(gb, 3) for gb in (e.peak_allocated_gb, e.peak_reserved_gb, outside)]
        return {"predicted_gb": predicted, "offloaded_gb": round(e.offloaded_gb, 3)}


def plan_memory(
    cfg: Union[CfgNode, DictConfig, Job],
    budget_gb: float,
    num_gpus: Optional[int] = None,
    allow: Sequence[str] = ("exact", "precision"),
    device: Union[DeviceModel, str, None] = None,
    progress: Callable[[str], None] = lambda line: None,
    probe: bool = False,
    *,
    evaluates: bool = True,
    prefer: str = "exact",
    counts_objects: bool = False,
    run: Optional[Union[str, Path]] = None,
    **given: Any,
) -> Plan:
    """Find the least harmful changes with which a job fits a budget.

    A job that fits is not changed. Effective batch, learning rate and iterations do not change.

    Args:
        budget_gb: device memory for the whole process, in GB of 2^30 bytes.
        allow: tiers that may be used, of "exact", "precision" and "recipe".
        progress: called with a line before each dry run.
        probe: whether to measure the final plan on this machine's GPU.
        cfg, num_gpus, device, evaluates, run, given: as for :func:`~d2_memfit.estimate_memory`.
        prefer: "exact", or "speed" for mixed precision first, where the card is faster with it.
        counts_objects: whether to tell how many objects fit.

    Raises:
        ConfigError: a value cannot work, or the config's model cannot be built.
    """
    check_positive_number("MEMFIT.BUDGET_GB of a plan", budget_gb)
    check_arguments({"MEMFIT.PLAN.ALLOW": allow, "MEMFIT.PLAN.PREFER": prefer})
    job = Job.from_any(cfg, ranks=num_gpus, **given)
    job = job.with_settings({"MEMFIT.BUDGET_GB": budget_gb})
    start = DryJob(job, device, evaluates, progress, run)
    is_more = start.device.is_gpu and budget_gb > start.device.usable_gb
    if is_more and (warning := why_no_card_has(budget_gb)):
        logger.warning(warning)
    ladder = Ladder(start, budget_gb, [tier for tier in TIERS if tier in allow], prefer)
    return _plan(ladder, start, budget_gb, probe, counts_objects and not probe)


def _plan(
    ladder: Ladder, start: DryJob, budget_gb: float, probe: bool, counts_objects: bool
) -> Plan:
    found = ladder.search()
    rung, num_images = found or ladder.smallest()
    rung, dry_job = ladder.dry_job(rung)
    steps, _ = ladder.steps(rung)
    is_of_work = all(s.tier != "precision" and s.name != "ActivationOffload" for s in steps)
    if num_images < start.num_images:
        dry_job, new = dry_job.with_images(num_images), {"MEMFIT.MICRO_BATCH": num_images}
        steps = PlanStep("smaller micro-batches", "exact", new, ""), *steps
    if probe:
        dry_job.probe()
    least = max(map(dry_job.budget_bytes, dry_job.uses()))
    least *= 1 if num_images in {n for n, _ in dry_job.runs} else 1.01  # lines are not exact
    fits = found is not None and least <= budget_gb * GB
    settings = {key: value for step in steps for key, value in step.settings.items()}
    settings["MEMFIT.BUDGET_GB"] = budget_gb
    if start.job.ranks == 1 or not ladder.has(nn.SyncBatchNorm, NaiveSyncBatchNorm):
        settings["MEMFIT.OOM.POLICY"] = "split"  # recovery cannot have both
    objects = dry_job.objects_that_fit(budget_gb) if counts_objects and fits else None
    return Plan(
        budget_gb=budget_gb,
        margin=dry_job.headroom_bytes(dry_job.use()) / (budget_gb * GB),
        fits=fits,
        steps=steps,
        settings=settings,
        before=start.estimate(with_range=False) if fits else None,
        estimate=replace(dry_job.estimate(with_range=False), objects_that_fit=objects),
        time_factor=dry_job.flops() / start.flops() if fits and is_of_work else None,
        smallest_budget_gb=None if fits else math.ceil(100 * least / GB) / 100,
        must_allow=() if fits else ladder.must_allow(),
        obstacle="" if fits else _obstacle(dry_job, num_images, ladder.trains_batch_norm),
        left_out=tuple(ladder.left_out),
    )


def _obstacle(dry_job: DryJob, num_images: int, trains_batch_norm: bool) -> str:
    """A line about what stands in the way, and what would change it."""
    use = dry_job.use(num_images)
    gb = use.total_bytes / GB
    if trains_batch_norm and num_images > 1:
        one = dry_job.use(1).total_bytes / GB
        return (
            f"BatchNorm is trained: the {num_images} images of one GPU cannot be split, and "
            f"need {gb:.2f} GB. One image on each of {num_images} GPUs needs {one:.2f} GB"
        )
    training, *evaluation = (use.allocated_bytes for use in dry_job.uses())
    if evaluation and evaluation[0] > training:
        how = "--training-only, or DATASETS.TEST ()"
        return f"Evaluation takes more memory than training. To plan for training alone: {how}"
    owner, num_bytes = use.breakdown.most_common(1)[0]
    images = "one image needs" if num_images == 1 else f"{num_images} images need"
    largest = f"The largest part: {owner} {num_bytes / GB:.2f} GB"
    return f"With all that may change, {images} {gb:.2f} GB. {largest}"
