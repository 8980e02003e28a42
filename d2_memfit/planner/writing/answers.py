# Copyright (c) the d2_memfit developers.
"""Estimates and plans in a few lines, the answer first."""

from collections.abc import Sequence
from typing import Optional

from ..estimates import MemoryEstimate, Range, in_words
from ..search import Plan, PlanStep
from .text import (
    EVALUATION_DECIDES,
    describe_chance,
    describe_harm,
    describe_objects,
    describe_settings,
    no_room,
    what_would_tell,
)

__all__ = ["answer_of_estimate", "answer_of_plan", "first_of"]

_MOST_STEPS = 3  # lines
_WIDTH = 100  # of a line about what is assumed
_WIDTH_OF_KEYS = 200  # of a line with keys or options, which are copied
_LARGEST = 3  # owners at the peak


def answer_of_estimate(
    e: MemoryEstimate,
    budget_gb: Optional[float] = None,
    limit_gb: float = 0.0,
    fits: bool = True,
) -> str:
    """The answer to the command estimate.

    Args:
        budget_gb: MEMFIT.BUDGET_GB, if there is one.
        limit_gb: what headroom leaves of it.
        fits: whether the job fits that.
    """
    at_least = "at least " if e.at_least else ""
    memory = "of a process" if e.expandable_segments is None else "of each GPU"
    if budget_gb is None:
        verdict = f"Needs {at_least}{e.device_total_gb:.1f} GB {memory}"
    else:
        does = "Fits" if fits else "Does not fit"
        left = f"{limit_gb:.2f} of {budget_gb:.4g} GB are left after headroom"
        verdict = f"{does}: needs {at_least}{e.device_total_gb:.2f} GB {memory}, {left}"
    low, high = e.device_range_gb
    height, width = e.image_size
    evaluation = "" if e.evaluation_gb is None else f", {e.evaluation_gb:.1f} in evaluation"
    if e.evaluation_host_gb:
        evaluation += f" with {e.evaluation_host_gb:.1f} of the host for masks as large as the file"
    owners = ((owner.replace(": ", " of "), gb) for owner, gb in e.breakdown.items())
    largest = [f"{owner} {gb:.1f}" for owner, gb in [*owners][:_LARGEST]]
    lines = [
        f"{verdict}. Its range: {low:.1f} to {high:.1f} GB",
        f"The largest micro-batch: {e.micro_batch_size} image{'s' * (e.micro_batch_size != 1)} "
        f"of {height} x {width} pixels{_objects(e)}",
        f"PyTorch allocates {e.peak_allocated_gb:.1f} GB in training{evaluation}. The largest "
        f"parts: {', '.join(largest)} GB",
    ]
    if e.expandable_segments is False and e.other_segments_gb is not None:
        lines.append(f"With expandable segments, as under a budget: {e.other_segments_gb:.1f} GB")
    lines.append(_objects_that_fit(e))
    lines += [_sources(e), *what_would_tell(e), *_unknown(e)]
    return "\n".join(filter(None, lines))


def answer_of_plan(plan: Plan) -> str:
    """The answer to the command plan, what is most important first."""
    lines = [_verdict(plan)]
    if not plan.fits and plan.must_allow:
        tiers = ",".join(plan.must_allow)
        lines.append(f"It fits if more may change: --allow {tiers}")
    if plan.fits:
        before_gb, limit_gb = plan.before.device_total_gb, plan.budget_gb * (1 - plan.margin)
        without = f"Without the plan: {before_gb:.1f} GB. " if plan.steps else ""
        if plan.steps and before_gb <= plan.budget_gb:  # headroom decides
            without = (
                f"Without the plan: {before_gb:.2f} GB, and headroom leaves {limit_gb:.2f} GB. "
            )
        about = f". Times {plan.estimate.times}" if plan.steps and plan.estimate.times else ""
        lines.append(f"{without}{describe_chance(plan)}{about}")
        lines += _changes(plan.steps)
        lines += [no_room(plan)] if plan.estimate.at_least else []
    else:
        lines.append(describe_chance(plan))
    lines += [EVALUATION_DECIDES] if plan.evaluation_decides else []
    lines.append(_objects_that_fit(plan.estimate))
    lines += _unknown(plan.estimate)
    if plan.other is not None:
        lines.append(
            f"With the same gradients, --allow exact: time x {in_words(plan.other.time_range)}, "
            f"{plan.other.device_total_gb:.1f} GB"
        )
    return "\n".join(filter(None, lines))


def _verdict(plan: Plan) -> str:
    at_least = "at least " if plan.estimate.at_least else ""
    budget = f"{plan.budget_gb:.4g} GB"
    if not plan.fits:
        return (
            f"Does not fit: with all that may change, the job needs a budget of {at_least}"
            f"{plan.smallest_budget_gb:.2f} GB, not {budget}"
        )
    memory = f"Fits: {at_least}{plan.estimate.device_total_gb:.1f} of {budget}"
    if not plan.steps:
        return f"{memory}, without a change"
    return f"{memory}, {_gradients(plan.steps)}, {_slower(plan.time_range)}"


def _gradients(steps: Sequence[PlanStep]) -> str:
    """What happens to the gradients, in the words of the most harmful step."""
    tiers = {step.tier for step in steps}
    for tier, words in (
        ("recipe", "another recipe"),
        ("precision", "other number formats"),
        ("not known", "gradients to be tested"),
    ):
        if tier in tiers:
            return words
    return "exact gradients"


def _slower(of: Range) -> str:
    """Text such as "4 to 10% slower" for a range of factors."""
    low, high = (round(100 * (factor - 1)) for factor in of)
    if high > 100:
        return f"{of[0]:.1f} to {of[1]:.1f} times the time"
    if low == high == 0:
        return "as fast"
    if low >= 0:
        return f"{low} to {high}% slower"
    if high <= 0:
        return f"{-high} to {-low}% faster"
    return f"{-low}% faster to {high}% slower"


def _changes(steps: Sequence[PlanStep]) -> list[str]:
    """A line for each step with its keys, and one about what the least exact step changes."""
    if not steps:
        return []
    shown = steps if len(steps) <= _MOST_STEPS else steps[: _MOST_STEPS - 1]
    lines = []
    for step in shown:
        gb = f"{step.gb_before:.1f} to {step.gb_after:.1f} GB"
        lines.append(
            f"  {_shortened(describe_settings(step.settings), _WIDTH_OF_KEYS)}  ({step.name}: {gb})"
        )
    more = steps[len(shown) :]
    if more:
        lines.append(f"  and {len(more)} more: {', '.join(step.name for step in more)}")
    harm = [describe_harm(step) for step in steps if step.what]
    return [*lines, *harm[-1:]]


def _objects(e: MemoryEstimate) -> str:
    if e.num_instances is None:
        return ""
    return f", with {e.num_instances} object{'s' * (e.num_instances != 1)} at most"


def _objects_that_fit(e: MemoryEstimate) -> str:
    return describe_objects(e.objects_that_fit) if e.objects_that_fit else ""


def _sources(e: MemoryEstimate) -> str:
    """The largest sources of the range."""
    widths = {source: sum(ends) for source, ends in e.widths.items()}
    whole = sum(widths.values())
    if whole < 0.005:
        return ""
    largest = sorted(widths.items(), key=lambda item: -item[1])[:_LARGEST]
    shares = (f"{source} {width / whole:.0%}" for source, width in largest)
    return f"The range comes from: {', '.join(shares)}"


def _unknown(e: MemoryEstimate) -> list[str]:
    """At most two lines, about what is not known and what is assumed in its place."""
    named = (("At least", e.at_least), ("Assumed", e.assumptions))
    return [f"{what}: {first_of(lines)}" for what, lines in named if lines]


def first_of(lines: Sequence[str], width: int = _WIDTH) -> str:
    """The first of some lines, with the number of the others."""
    more = f" (and {len(lines) - 1} more)" if lines[1:] else ""
    return _shortened(lines[0], width) + more


def _shortened(text: str, width: int = _WIDTH) -> str:
    return text if len(text) <= width else text[: width - 4].rstrip() + " ..."
