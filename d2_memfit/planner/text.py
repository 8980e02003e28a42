# Copyright (c) the d2_memfit developers.
"""Estimates and plans as tables for users."""

from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate

from .dry_job import MemoryEstimate
from .plan import OtherPlan, Plan

_EVALUATION_DECIDES = (
    "Evaluation takes more memory than training here. To plan for training alone: --training-only, "
    "or DATASETS.TEST ()"
)

__all__ = ["describe_estimate", "describe_plan", "why_it_does_not_fit"]


def describe_estimate(estimate: MemoryEstimate) -> str:
    e = estimate
    height, width = e.image_size
    lines = [
        f"{e.device}, {e.num_gpus} GPU{'s' * (e.num_gpus > 1)}",
        f"Each iteration: {e.images_per_gpu} images per GPU x {e.accumulation_steps} steps, "
        f"{e.micro_batch_size} at a time",
        f"The largest images: {height} x {width} pixels, {e.num_instances} instances",
        *_allocator(e),
        *(f"Assumed: {line}" for line in e.assumptions),
        "",
        _table(
            [
                ["peak allocated", e.peak_allocated_gb],
                ["peak reserved", e.peak_reserved_gb],
                ["evaluation, peak allocated", e.evaluation_gb],
                ["of the device, with its context", e.device_total_gb],
            ],
            ["", "GB"],
        ),
        "",
        _table(list(e.breakdown.items()), ["at the peak in training", "GB"]),
        "",
        _table(list(e.outside.items()), ["beside what is allocated", "GB"]),
    ]
    return "\n".join(lines)


def describe_plan(plan: Plan) -> str:
    free = f"{plan.margin:.0%} of it left free"
    lines = [f"Budget: {plan.budget_gb:.4g} GB, {free}. It needs {_needs(plan)}."]
    if plan.steps:
        rows = [
            [s.name, s.tier, s.gb_before, s.gb_after, s.time_factor, _settings(s.settings)]
            for s in plan.steps
        ]
        header = ["step", "tier", "GB before", "GB after", "time x", "settings"]
        lines += ["", _table(rows, header)]
        lines += [f"{s.name} changes {s.what}" for s in plan.steps if s.what]
    if plan.exact is not None:
        lines += ["", _exact(plan.exact)]
    if plan.left_out:
        lines += ["", *plan.left_out]
    if plan.cost_model:
        lines += ["", plan.cost_model]
    e = plan.estimate
    lines += [
        "",
        f"Time of an iteration, predicted: x {plan.time_factor:.2f}",
        f"SOLVER.IMS_PER_BATCH {e.images_per_gpu * e.num_gpus} x SOLVER.ACCUMULATION_STEPS "
        f"{e.accumulation_steps}, as before",
        f"Host: {e.num_workers} workers of the loader on each rank, about {e.host_gb:.1f} GB",
        "",
        describe_estimate(e),
    ]
    if plan.evaluation_decides:
        lines += ["", _EVALUATION_DECIDES]
    if not plan.fits:
        lines += ["", why_it_does_not_fit(plan)]
    return "\n".join(lines)


def why_it_does_not_fit(plan: Plan) -> str:
    decides = f". {_EVALUATION_DECIDES}" if plan.evaluation_decides else ""
    how = f"The smallest budget is {plan.smallest_budget_gb:.2f} GB"
    if plan.must_allow:
        how += f", unless MEMFIT.PLAN.ALLOW is {', '.join(plan.must_allow)}"
    return f"MEMFIT.BUDGET_GB {plan.budget_gb:.4g}: the job does not fit. {how}{decides}"


def _needs(plan: Plan) -> str:
    before, after = plan.before.device_total_gb, plan.estimate.device_total_gb
    return f"{after:.2f} GB" + (f", without the plan {before:.2f} GB" if plan.steps else "")


def _exact(other: OtherPlan) -> str:
    """A line about the exact plan, which a user may prefer to a faster plan."""
    settings = _settings(other.settings) or "no change"
    return (
        f"With the same gradients (--allow exact): time x {other.time_factor:.2f}, "
        f"{other.device_total_gb:.2f} GB, {settings}"
    )


def _allocator(estimate: MemoryEstimate) -> list[str]:
    if estimate.expandable_segments is None:
        return []
    kind = "expandable" if estimate.expandable_segments else "of PyTorch's default"
    return [f"Segments of the allocator: {kind}"]


def _settings(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def _table(rows: Iterable[Sequence[Any]], header: list[str]) -> str:
    return tabulate(rows, header, tablefmt="pipe", floatfmt=".2f")
