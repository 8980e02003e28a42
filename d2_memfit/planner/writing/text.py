# Copyright (c) the d2_memfit developers.
"""Estimates and plans as tables for users."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import tabulate

from ..estimates import (
    OF_TENSORS,
    MemoryEstimate,
    MostObjects,
    ObjectsThatFit,
    in_words,
    range_of,
)
from ..search import OtherPlan, Plan, PlanStep

EVALUATION_DECIDES = (
    "Evaluation takes more memory than training here. To plan for training alone: --training-only, "
    "or DATASETS.TEST ()"
)


# What a user can tell, by source.
_OF_DATA = "the data (--coco, or --image-size and --instances)"
_TELLS = {
    "shape": _OF_DATA,
    "objects": _OF_DATA,
    "card": "the card",
    "release": "PyTorch's release",
}

__all__ = [
    "EVALUATION_DECIDES",
    "describe_batch",
    "describe_chance",
    "describe_estimate",
    "describe_harm",
    "describe_objects",
    "describe_plan",
    "describe_settings",
    "describe_sources",
    "no_room",
    "what_would_tell",
    "why_it_does_not_fit",
]


def describe_batch(estimate: MemoryEstimate) -> list[str]:
    """Lines about the largest batch, its unknowns, and the range of the estimate."""
    e = estimate
    height, width = e.image_size
    known = e.num_instances is not None
    objects = f", {e.num_instances} instances in the most crowded" if known else ""
    lines = [
        f"Each iteration: {e.images_per_gpu * e.accumulation_steps} images per {_unit(e)}, "
        f"in micro-batches of {e.micro_batch_size}",
        f"The largest images: {height} x {width} pixels{objects}",
        *(f"Assumed: {line}" for line in e.assumptions),
        *(f"At least: {line}" for line in e.at_least),
    ]
    fitting = e.objects_that_fit
    return [*lines, *_range(e), *([describe_objects(fitting)] if fitting else [])]


def describe_objects(objects: ObjectsThatFit) -> str:
    """A line about how many objects fit."""
    line = f"Objects that fit in each image: {_most(objects.as_it_is)}"
    if objects.with_techniques is None:
        return line
    return f"{line}; {_most(objects.with_techniques)} with {describe_settings(objects.settings)}"


def _most(most: MostObjects) -> str:
    if most.does_not_fit is None:
        return f"at least {most.fits:,}"
    if not most.fits:
        return "none, 1 is too many"
    return f"{most.fits:,}, and {most.does_not_fit:,} do not"


def _range(e: MemoryEstimate) -> list[str]:
    """Lines about the range of the memory, its parts, and a typical batch."""
    (low, high), (device_low, device_high) = e.range_gb, e.device_range_gb
    lines = [
        f"Range: {low:.2f} to {high:.2f} GB allocated in training, {device_low:.2f} to "
        f"{device_high:.2f} GB of the device",
        f"By source: {describe_sources(e, e.widths)}",
    ]
    if e.typical_gb is not None:
        objects = f", {e.typical_instances} instances in each" if e.typical_instances else ""
        height, width = e.typical_size
        lines.append(
            f"Typical: {e.typical_gb:.2f} GB allocated, {height} x {width} pixels{objects}"
        )
    return [*lines, *what_would_tell(e)]


def describe_sources(e: MemoryEstimate, sources: Iterable[str] = OF_TENSORS) -> str:
    """What the range of an estimate comes from, in GB below and above it, the largest first."""
    widths = {source: e.widths[source] for source in sources}
    whole = sum(map(sum, widths.values())) or 1.0
    largest_first = sorted(widths.items(), key=lambda item: -sum(item[1]))
    return ", ".join(
        f"{source} -{below:.2f} +{above:.2f} GB ({(below + above) / whole:.0%})"
        for source, (below, above) in largest_first
        if below + above > 0.005
    )


def what_would_tell(e: MemoryEstimate) -> list[str]:
    """A line about what a user can tell, to make the range narrower; none if that is little."""
    known = {source: (0.0, 0.0) for source in _TELLS}
    told = [(source, how) for source, how in _TELLS.items() if sum(e.widths[source]) > 0.005]
    low, high = range_of(e.peak_allocated_gb, {**e.widths, **known}, OF_TENSORS)
    before, after = e.range_gb[1] / e.range_gb[0], high / low
    if not told or after > 0.95 * before:
        return []
    how = ", ".join(dict.fromkeys(how for _, how in told))
    return [f"Tell {how}, and the range shrinks from x {before:.2f} to x {after:.2f}"]


def _unit(estimate: MemoryEstimate, number: int = 1) -> str:
    if estimate.expandable_segments is None:
        return "process" if number == 1 else "processes"
    return "GPU" if number == 1 else "GPUs"


def describe_estimate(estimate: MemoryEstimate) -> str:
    e = estimate
    lines = [
        f"{e.device}, {e.num_gpus} {_unit(e, e.num_gpus)}",
        *filter(None, [e.from_run]),
        *describe_batch(e),
        *_allocator(e),
        "",
        _table(
            [
                ["peak allocated", e.peak_allocated_gb],
                ["peak reserved", e.peak_reserved_gb],
                ["evaluation, peak allocated", e.evaluation_gb],
                *([["evaluation, on the host", e.evaluation_host_gb]] * bool(e.evaluation_host_gb)),
                ["of the device, with its context", e.device_total_gb],
            ],
            ["", "GB, at least" if e.at_least else "GB, worst case"],
        ),
        "",
        _table(list(e.breakdown.items()), ["at the peak in training", "GB"]),
        "",
        _table(list(e.outside.items()), ["in addition to peak allocated", "GB"]),
    ]
    return "\n".join(lines)


def describe_plan(plan: Plan) -> str:
    lines = [
        *_verdict(plan),
        f"Budget: {plan.budget_gb:.4g} GB, with {plan.margin:.0%} headroom. The job needs "
        f"{_needs(plan)}.",
        describe_chance(plan),
    ]
    if plan.steps:
        rows = [
            [
                *(s.name, s.tier, s.gb_before, s.gb_after, in_words(s.time_range)),
                describe_settings(s.settings),
            ]
            for s in plan.steps
        ]
        header = ["step", "tier", "GB before", "GB after", "time x", "settings"]
        lines += ["", _table(rows, header)]
        lines += [describe_harm(step) for step in plan.steps if step.what]
    if plan.other is not None:
        lines += ["", _other(plan.other)]
    if plan.left_out:
        lines += ["", *plan.left_out]
    e = plan.estimate
    lines += [
        "",
        f"Predicted time of an iteration: x {in_words(plan.time_range)}{_about(e)}",
        f"SOLVER.IMS_PER_BATCH {e.images_per_gpu * e.num_gpus} x SOLVER.ACCUMULATION_STEPS "
        f"{e.accumulation_steps}, as before",
        _host(e),
        "",
        describe_estimate(e),
    ]
    if plan.evaluation_decides:
        lines += ["", EVALUATION_DECIDES]
    return "\n".join(lines)


def describe_harm(step: PlanStep) -> str:
    """A line about what a step changes in training."""
    ending = "" if step.name.endswith("batches") else "s"
    return f"{step.name} change{ending} {step.what}"


def _about(e: MemoryEstimate) -> str:
    return f", {e.times}" if e.times else ""


def _verdict(plan: Plan) -> list[str]:
    """The first lines, if the plan does not fit, or may not fit."""
    if not plan.fits:
        return [why_it_does_not_fit(plan), ""]
    return [no_room(plan), ""] if plan.estimate.at_least else []


def _host(e: MemoryEstimate) -> str:
    line = f"Host: {e.num_workers} loader workers on each rank, about {e.host_gb:.1f} GB of RAM"
    line += f", {e.offloaded_gb:.1f} of it for the offload" if e.offloaded_gb else ""
    in_evaluation = f", {e.evaluation_host_gb:.1f} of it in evaluation"
    return line + in_evaluation * bool(e.evaluation_host_gb)


def why_it_does_not_fit(plan: Plan) -> str:
    decides = f". {EVALUATION_DECIDES}" if plan.evaluation_decides else ""
    at_least = "at least " if plan.estimate.at_least else ""
    tiers = ", ".join(plan.must_allow)
    unless = f", unless MEMFIT.PLAN.ALLOW is {tiers}" if tiers else ""
    how = f"The smallest budget is {at_least}{plan.smallest_budget_gb:.2f} GB{unless}"
    chance = f". {describe_chance(plan)}"
    if plan.chance > 0.5:
        chance += f": MEMFIT.PLAN.RISK {math.ceil(100 * (1 - plan.chance)) / 100} accepts that"
    return f"MEMFIT.BUDGET_GB {plan.budget_gb:.4g}: the job does not fit. {how}{chance}{decides}"


def describe_chance(plan: Plan) -> str:
    """A line about how likely the plan is to fit."""
    # Too few runs of others are known to tell more (docs/HOW_ACCURATE.md).
    of_20 = f"about {round(20 * plan.chance)}"
    if not 1 <= round(20 * plan.chance) <= 18:
        of_20 = "at least 19" if plan.chance > 0.5 else "at most 1"
    return f"Chance to fit: {of_20} of 20 runs like this"


def _needs(plan: Plan) -> str:
    before, after = plan.before.device_total_gb, plan.estimate.device_total_gb
    at_least = "at least " if plan.estimate.at_least else ""
    without = f"; without the plan, {before:.2f} GB" if plan.steps else ""
    other = plan.before.other_segments_gb
    if plan.steps and other is not None and plan.before.expandable_segments:
        without += f" ({other:.2f} GB with PyTorch's default segments)"
    return f"{at_least}{after:.2f} GB{without}"


def no_room(plan: Plan) -> str:
    """A line about a plan with parts whose largest size is not known."""
    recovers = plan.settings.get("MEMFIT.OOM.POLICY") == "split"
    what = "images that need more run again in smaller pieces" if recovers else "the run ends"
    return (
        "The plan has no headroom for what is not known: see the lines that begin with At least. "
        f"If that does not fit, {what}"
    )


def _other(other: OtherPlan) -> str:
    """A line about a plan that a user may prefer."""
    settings = describe_settings(other.settings) or "no change"
    return (
        f"With the same gradients (--allow exact): time x {in_words(other.time_range)}, "
        f"{other.device_total_gb:.2f} GB, {settings}"
    )


def _allocator(estimate: MemoryEstimate) -> list[str]:
    """A line about the segments of PyTorch's allocator, with both kinds side by side."""
    if estimate.expandable_segments is None:
        return []
    kind, other = "PyTorch's default", "expandable segments, as under a budget"
    if estimate.expandable_segments:
        kind, other = "expandable", "PyTorch's default"
    line = f"Segments of the allocator: {kind}"
    if estimate.other_segments_gb is None:
        return [line]
    return [f"{line}. With {other}: {estimate.other_segments_gb:.2f} GB of the device"]


def describe_settings(settings: dict[str, Any]) -> str:
    """Config keys and values in a line."""
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def _table(rows: Iterable[Sequence[Any]], header: list[str]) -> str:
    return tabulate(rows, header, tablefmt="pipe", floatfmt=".2f")
