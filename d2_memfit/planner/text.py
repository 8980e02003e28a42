# Copyright (c) the d2_memfit developers.
"""Estimates and plans as text: the answer in a few lines, and all details."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Optional

from tabulate import tabulate

from .estimate import MOST_OBJECTS, MemoryEstimate
from .ladder import PlanStep
from .plan import Plan

__all__ = ["answer_of_estimate", "answer_of_plan", "describe_estimate", "describe_plan"]
__all__ += ["describe_settings", "first_of", "lines_of_plan"]

_MOST_STEPS = 3  # lines
_WIDTH = 100  # of a line about what is assumed
_WIDTH_OF_KEYS = 200  # of a line with keys, which are copied
_LARGEST = 3  # owners at the peak
_AS_LINES = ("from_run", "assumptions", "at_least", "wider", "objects_that_fit")
_MUCH = 1.01  # times the work of an iteration, from which on a plan says so


def answer_of_estimate(
    e: MemoryEstimate, budget_gb: Optional[float] = None, fits: bool = True
) -> str:
    """The answer to the command estimate, with a verdict if the job has a budget."""
    of = "a process" if e.expandable_segments is None else "each GPU"
    needs = f"{_at_least(e)}{e.device_total_gb:.2f} GB of {of}"
    verdict = f"Needs {needs}"
    if budget_gb is not None:
        does = "Fits" if fits else "Does not fit"
        verdict = f"{does}: needs {needs}, and the budget is {budget_gb:.4g} GB with its headroom"
    evaluation = "" if e.evaluation_gb is None else f", {e.evaluation_gb:.1f} in evaluation"
    largest = [f"{owner.replace(': ', ' of ')} {gb:.1f}" for owner, gb in e.breakdown.items()]
    objects = "" if e.num_instances is None else f", with {e.num_instances} objects at most"
    (height, width), (low, high) = e.image_size, e.device_range_gb
    because = f", because {first_of(e.wider)}" if e.wider else ""
    lines = [
        f"{verdict}. Its range: {low:.1f} to {high:.1f} GB{because}",
        f"The largest micro-batch: {e.micro_batch_size} image{'s' * (e.micro_batch_size != 1)} "
        f"of {height} x {width} pixels{objects}",
        f"PyTorch allocates {e.peak_allocated_gb:.1f} GB in training{evaluation}. The largest "
        f"parts: {', '.join(largest[:_LARGEST])} GB",
        _objects(e),
        *_unknown(e),
    ]
    return "\n".join(filter(None, lines))


def answer_of_plan(plan: Plan) -> str:
    """The answer to the command plan, what is most important first."""
    e = plan.estimate
    return "\n".join(filter(None, [*lines_of_plan(plan), _objects(e), *_unknown(e)]))


def lines_of_plan(plan: Plan) -> list[str]:
    """Whether it fits, and what it changes or what stands in the way."""
    e = plan.estimate
    if not plan.fits:
        least = f"{_at_least(e)}{plan.smallest_budget_gb:.2f} GB, not {plan.budget_gb:.4g} GB"
        more = f"It fits if more may change: --allow {','.join(plan.must_allow)}"
        return [
            f"Does not fit: with all that may change, the job needs a budget of {least}",
            f"In the way: {plan.obstacle}",
            *([more] if plan.must_allow else []),
        ]
    tiers = {step.tier for step in plan.steps}  # the most harmful one tells
    how = "exact gradients" if tiers else "without a change"
    how = "other number formats" if "precision" in tiers else how
    how = "another recipe" if "recipe" in tiers else how
    if plan.steps and (plan.time_factor or 1) > _MUCH:
        how += f", time x {plan.time_factor:.2f}"
    lines = [f"Fits: {_at_least(e)}{e.device_total_gb:.1f} of {plan.budget_gb:.4g} GB, {how}"]
    if plan.steps and plan.before is not None:
        before_gb = plan.before.device_total_gb
        headroom = f", and headroom takes {plan.budget_gb * plan.margin:.2f} of the budget"
        headroom *= before_gb <= plan.budget_gb
        lines.append(f"Without the plan: {before_gb:.1f} GB{headroom}")
    return lines + _changes(plan.steps)


def describe_estimate(e: MemoryEstimate) -> str:
    """All that is known of an estimate: a line for each assumption, and all numbers."""
    lines = [
        e.from_run,
        *(f"Assumed: {line}" for line in e.assumptions),
        *(f"At least: {line}" for line in e.at_least),
        *(f"Its range is wider because {line}" for line in e.wider),
        _objects(e),
    ]
    rows, tables = [], []
    for name, value in asdict(e).items():
        title = re.sub(" gb$", ", GB", name.replace("_", " "))
        if isinstance(value, dict):
            tables.append(_table(value.items(), [title, "GB"]))
        elif value is not None and name not in _AS_LINES:
            numbers = value if isinstance(value, tuple) else [value]
            is_float = isinstance(numbers[0], float)
            between, form = (" to ", ".2f") if is_float else (" x ", "")
            rows.append([title, between.join(f"{number:{form}}" for number in numbers)])
    first = _table(rows, ["", "at least" if e.at_least else "worst case"])
    return "\n\n".join(filter(None, ["\n".join(filter(None, lines)), first, *tables]))


def describe_plan(plan: Plan) -> str:
    """All that is known of a plan in addition to its answer."""
    e = plan.estimate
    rows = [[s.name, s.tier, describe_settings(s.settings)] for s in plan.steps]
    lines = [
        f"SOLVER.IMS_PER_BATCH {e.images_per_gpu * e.num_gpus} x SOLVER.ACCUMULATION_STEPS "
        f"{e.accumulation_steps}, as before",
        *filter(None, map(_harm, plan.steps)),
        *plan.left_out,
    ]
    table = [_table(rows, ["step", "tier", "settings"])] if rows else []
    return "\n\n".join(["\n".join(lines), *table, describe_estimate(e)])


def describe_settings(settings: dict[str, Any]) -> str:
    """Config keys and values in a line."""
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def first_of(lines: Sequence[str], width: int = _WIDTH) -> str:
    """The first of some lines, with the number of the others."""
    more = f" (and {len(lines) - 1} more)" if lines[1:] else ""
    return _shortened(lines[0], width) + more


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 4].rstrip() + " ..."


def _at_least(e: MemoryEstimate) -> str:
    return "at least " if e.at_least else ""


def _objects(e: MemoryEstimate) -> str:
    if e.objects_that_fit is None:
        return ""
    more = " or more" * (e.objects_that_fit >= MOST_OBJECTS)
    return f"Objects that fit in each image: about {e.objects_that_fit:,}{more}"


def _unknown(e: MemoryEstimate) -> list[str]:
    """At most two lines, about what is not known and what is assumed in its place."""
    named = (("At least", e.at_least), ("Assumed", e.assumptions))
    return [f"{what}: {first_of(lines)}" for what, lines in named if lines]


def _changes(steps: Sequence[PlanStep]) -> list[str]:
    """A line for each step with its keys, and one about what the least exact step changes."""
    keys = [_shortened(describe_settings(step.settings), _WIDTH_OF_KEYS) for step in steps]
    lines = [f"  {of_step}  ({step.name})" for of_step, step in zip(keys, steps[:_MOST_STEPS])]
    if more := [step.name for step in steps[_MOST_STEPS:]]:
        lines.append(f"  and {len(more)} more: {', '.join(more)}")
    return [*lines, *[*filter(None, map(_harm, steps))][-1:]]


def _harm(step: PlanStep) -> str:
    """A line about what a step changes in training; "" if it changes nothing."""
    ending = "" if step.name.endswith("batches") else "s"
    return f"{step.name} change{ending} {step.what}" if step.what else ""


def _table(rows: Iterable[Sequence[Any]], header: list[str]) -> str:
    return tabulate(rows, header, tablefmt="pipe", floatfmt=".2f")
