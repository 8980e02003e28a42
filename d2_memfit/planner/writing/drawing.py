# Copyright (c) the d2_memfit developers.
"""The content of HTML pages about dry runs and plans."""

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, Optional, Union

from ...common.units import GB
from ...config.cards import PRESETS
from ...errors import MemfitError
from ...report import Bar, Chart, Page, Tensor
from ...techniques import TECHNIQUES, get_technique
from ..dry_run import Allocate, Allocation, Free
from ..estimates import DryJob, in_words
from ..search import Plan, preference
from .plan_file import keys_as_yaml
from .text import describe_batch, describe_settings

__all__ = ["chart_of", "page_of_estimate", "page_of_plan"]

_TOO_SMALL = 1e-4  # share of the peak; smaller tensors are not drawn


def page_of_estimate(
    dry_job: DryJob,
    answer: str,
    next_step: str,
    progress: Callable[[str], None] = lambda line: None,
) -> Page:
    """The page of a job without changes.

    Args:
        answer, next_step: what the command prints.
        progress: called with a line for each change that is tried.
    """
    return Page(
        title=f"What a job needs of {dry_job.device.description}",
        answer=answer,
        next_step=next_step,
        job_lines=_job_lines(dry_job),
        charts=[chart_of(dry_job, "training")],
        limits_gb=_limits(dry_job, dry_job.job.budget_gb),
        bars=_bars(dry_job, progress),
    )


def page_of_plan(
    plan: Plan,
    before: DryJob,
    after: DryJob,
    answer: str,
    next_step: str,
    progress: Callable[[str], None] = lambda line: None,
) -> Page:
    """The page of a plan.

    Args:
        before, after: the job without and with the plan.
        answer, next_step: what the command prints.
        progress: called with a line for each change that is tried.
    """
    charts = [chart_of(after, "with the plan")]
    if plan.steps:
        charts.insert(0, chart_of(before, "without the plan"))
    header = ["step", "tier", "GB before", "GB after", "time x", "settings", "what it changes"]
    rows = [
        [
            *(s.name, s.tier, f"{s.gb_before:.2f}", f"{s.gb_after:.2f}", in_words(s.time_range)),
            *(describe_settings(s.settings), s.what),
        ]
        for s in plan.steps
    ]
    return Page(
        title=f"A plan for {plan.budget_gb:.4g} GB of {before.device.description}",
        answer=answer,
        next_step=next_step,
        job_lines=_job_lines(after),
        charts=charts,
        limits_gb=_limits(after, plan.budget_gb),
        keys=keys_as_yaml(before.job, plan),
        bars=_bars(before, progress),
        steps=[header, *rows] if rows else None,
    )


def _job_lines(dry_job: DryJob) -> list[str]:
    e = dry_job.estimate(dry_job.limit_bytes)
    return [f"{e.num_gpus} GPU{'s' * (e.num_gpus > 1)}", *describe_batch(e)]


def _limits(dry_job: DryJob, budget_gb: Optional[float]) -> dict[str, float]:
    """The budget, and the smallest card that has this much memory."""
    limits = {} if budget_gb is None else {"budget": budget_gb}
    needed = dry_job.total_bytes(dry_job.limit_bytes) / GB if budget_gb is None else budget_gb
    cards = [name for name, gb in PRESETS.items() if gb >= needed]
    if dry_job.device.is_gpu and cards:
        card = cards[0]
        limits[f"{card} card, of which a process gets {PRESETS[card]:g} GB"] = float(card[:-2])
    return limits


def chart_of(dry_job: DryJob, name: str) -> Chart:
    """Memory over a dry run, tensor by tensor."""
    device, limit = dry_job.device, dry_job.limit_bytes
    tensors, phases, num_steps, left_out = _tensors(device.events(dry_job.training))
    use = dry_job.training_use(limit)
    context = use.total_bytes - use.reserved_bytes
    return Chart(name, tensors, num_steps, phases, context, use.total_bytes, left_out)


def _tensors(
    events: Iterable[Union[Allocate, Free]],
) -> tuple[list[Tensor], list[tuple[str, int]], int, int]:
    """Tensors, first steps of phases, last step, and peak bytes of tensors not drawn.

    Tensors that the setup leaves begin at step 0.
    """
    events = list(events)
    start = next((i for i, e in enumerate(events) if e.phase != "setup"), len(events))
    begins = {e.allocation: max(i, start) for i, e in enumerate(events) if isinstance(e, Allocate)}
    ends = {e.allocation: i for i, e in enumerate(events) if isinstance(e, Free)}
    there = [a for a in begins if ends.get(a, start) >= start]
    limit = _TOO_SMALL * _most(events, there)
    drawn = [a for a in there if a.num_bytes > limit]
    times = sorted({start, *(begins[a] for a in drawn), *(ends[a] for a in drawn if a in ends)})
    steps = {time: step for step, time in enumerate(times)}
    last = len(times)
    tensors = [_tensor(a, steps[begins[a]], steps[ends[a]] if a in ends else last) for a in drawn]
    phases: dict[str, int] = {}
    for a in drawn:
        if a.phase != "setup":
            phases.setdefault(a.phase, steps[begins[a]])
    return tensors, list(phases.items()), last, _most(events, set(there) - set(drawn))


def _tensor(a: Allocation, begin: int, end: int) -> Tensor:
    return Tensor(begin, end, a.num_bytes, a.owner, a.module, str(a), a.phase)


def _most(events: list[Union[Allocate, Free]], of: Iterable[Allocation]) -> int:
    """Peak bytes of these allocations."""
    allocations = set(of)
    num_bytes = [event.num_bytes for event in events if event.allocation in allocations]
    return max(accumulate(num_bytes), default=0)


def _bars(before: DryJob, progress: Callable[[str], None]) -> list[Bar]:
    """Bars of the job without changes, with one image at a time, and with single changes.

    A change is an exact technique or a change of precision that has an effect on the job.
    """
    job = before.job
    knobs: dict[str, tuple[str, dict[str, Any]]] = {}
    if job.geometry.largest_micro_batch > 1:
        knobs["1 image at a time"] = ("", {"MEMFIT.MICRO_BATCH": 1})
    for name in sorted((n for n, t in TECHNIQUES if t.tier != "recipe"), key=preference):
        technique = get_technique(name)
        if not technique.in_plans or (technique.gpu_only and not before.device.is_gpu):
            continue
        settings = technique.enabling_settings(job.cfg)
        if settings and job.with_settings(settings).cfg != job.cfg:
            knobs[name] = (technique.tier, settings)
    bars = [Bar("as it is", "", before.training_use(None).total_bytes / GB, "1.00", "")]
    for name, (tier, settings) in knobs.items():
        try:
            dry_job = DryJob(job.with_settings(settings), before.device, evaluates=False)
        except MemfitError as e:
            progress(f"{name} is left out: {e}")
            continue
        gb = dry_job.training_use(None).total_bytes / GB
        progress(f"{gb:.2f} GB: {name}")
        if dry_job.training.changes_bytes() != before.training.changes_bytes():
            time = in_words(dry_job.time_range(before))
            bars.append(Bar(name, tier, gb, time, describe_settings(settings)))
    return bars
