# Copyright (c) the d2_memfit developers.
"""The checks of the planner in each project; each returns the text of its cell."""

from collections.abc import Iterator

import torch
from detectron2.utils.events import EventStorage

from d2_memfit import Job
from d2_memfit.errors import ConfigError
from d2_memfit.memory import TensorMeter
from d2_memfit.planner import DryJob, plan_memory, steps
from d2_memfit.planner.device_model import DeviceModel
from d2_memfit.planner.order import preference
from d2_memfit.techniques import TECHNIQUES

from .subject import Subject

__all__ = ["PLANNING", "applies", "estimates", "plans"]

_CARD = "cuda"  # device of the plans
_TOLERANCE = 0.005
_GB = 2**30
_OF_ALL = 0.7  # a plan's share of the recipe's memory
_SAVES = 0.98  # largest share of the peak with which a technique counts as effective

_OWN_STEP = "its step is not `model(batch)`"


def estimates(subject: Subject) -> str:
    """Compare the peaks of a dry run with those of the same computed step and evaluation."""
    if not subject.project.has_plain_step:
        return _OWN_STEP
    dry_job = _dry(subject.job(subject.settings(subject.project.images)))
    cells = []
    timelines = [t for t in (dry_job.training, dry_job.evaluation) if t is not None]
    phases = zip(("training", "evaluation"), timelines, _measured(dry_job))
    for phase, timeline, measured in phases:
        estimated = sum(timeline.peak().values())
        error = f"{estimated / measured - 1:+.1%} of {measured / _GB:.2f} GB"
        if abs(estimated / measured - 1) > _TOLERANCE:
            cells.append(f"{phase} {error}")
    return ", ".join(cells) or "y"


def plans(subject: Subject) -> str:
    """Plan the project's own recipe, and train a small iteration with the plan."""
    if not subject.project.has_plain_step:
        return _OWN_STEP
    images = 2 * subject.project.least_images
    job = _full_size(subject, images)
    needs = _dry(job, _CARD).least_bytes()
    budget_gb = _OF_ALL * needs / _GB / (1 - job.cfg.MEMFIT.PLAN.MARGIN)
    plan = plan_memory(job, budget_gb, device=_CARD)
    if not plan.fits:
        return f"none for {budget_gb:.1f} GB"
    settings = {**subject.settings(images), **plan.settings}
    settings.pop("MEMFIT.BUDGET_GB", None)
    subject.run(settings, num_iterations=1, name="planned")
    names = ", ".join(step.name for step in plan.steps)
    return f"y: {needs / _GB:.1f} GB in {budget_gb:.1f} by {names}"


def applies(subject: Subject) -> str:
    """Find techniques that keep the recipe and lower the peak of its training step."""
    if not subject.project.has_plain_step:
        return _OWN_STEP
    job = _full_size(subject, subject.project.images)
    whole = _peak(job)
    names = []
    for name, technique in sorted(TECHNIQUES, key=lambda item: preference(item[0])):
        if technique.tier == "recipe" or not technique.planned or technique.gpu_only:
            continue
        try:
            changed = job.with_settings(technique.enabling_settings(job.cfg) or {})
            if changed.cfg == job.cfg:
                continue
            peak = _peak(changed)
        except ConfigError as e:
            if e.__cause__ is not None:  # the technique was applied, and the model did not run
                names.append(f"{name} fails: {type(e.__cause__).__name__}")
            continue
        if peak < _SAVES * whole:
            names.append(f"{name} {peak / whole - 1:+.0%}")
    return ", ".join(names) or "none"


def _full_size(subject: Subject, images: int) -> Job:
    settings = {**subject.settings(images), **subject.no_evaluation}
    return subject.job(settings, full_size=True)


def _dry(job: Job, device: str = "cpu") -> DryJob:
    return DryJob(job, DeviceModel.load(device))


def _peak(job: Job) -> int:
    return sum(_dry(job).training.peak().values())


def _measured(dry_job: DryJob) -> Iterator[int]:
    """Peak bytes of tensors in an iteration, then in an evaluation."""
    job = dry_job.job
    with torch.random.fork_rng([]), EventStorage(), TensorMeter() as meter:
        torch.manual_seed(0)
        model, optimizer = steps.build_with_values(job, "cpu")
        precision = job.precision("cpu")
        batch = job.training_batch()
        for _ in range(2):  # the second finds the optimizer's states there
            optimizer.zero_grad(set_to_none=True)
            for _ in steps.iterate(model, optimizer, precision, [batch]):
                pass
        yield meter.peak_bytes
        del batch
        if dry_job.evaluation is not None:
            batch = job.evaluation_batch()
            meter.peak_bytes = meter.live_bytes
            steps.infer(model, job, batch)
            yield meter.peak_bytes


PLANNING = {"estimate against measured": estimates, "plan": plans, "techniques": applies}
