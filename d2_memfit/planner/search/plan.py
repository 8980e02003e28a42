# Copyright (c) the d2_memfit developers.
"""The content of a plan: changes to a config, and the memory that the job then needs."""

from dataclasses import dataclass
from typing import Any, Optional

from ..estimates import MemoryEstimate, Range

__all__ = ["OtherPlan", "Plan", "PlanStep"]


@dataclass(frozen=True)
class PlanStep:
    """One change of a plan.

    Attributes:
        name: a technique, "smaller micro-batches", or "every technique" of a tier, if none fits.
        tier: "exact", "precision" or "recipe"; "not known" for smaller micro-batches, because only
            a test can tell whether the losses allow them.
        settings: config keys and their new values.
        what: what it changes in training, for tiers other than exact.
        gb_before, gb_after: device memory of the process without and with this step; later steps
            are not applied.
        time_factor: predicted seconds per iteration with this step over those without.
        time_range: range of ``time_factor``.
    """

    name: str
    tier: str
    settings: dict[str, Any]
    what: str
    gb_before: float
    gb_after: float
    time_factor: float
    time_range: Range


@dataclass(frozen=True)
class OtherPlan:
    """The exact plan that fits, if a faster one was asked for.

    Attributes:
        settings: settings of all its steps.
        device_total_gb: device memory of the process.
        time_factor, time_range: as for a :class:`Plan`.
    """

    settings: dict[str, Any]
    device_total_gb: float
    time_factor: float
    time_range: Range


@dataclass(frozen=True)
class Plan:
    """Changes that make a job fit, and the memory that it then needs.

    Attributes:
        budget_gb: device memory for the whole process.
        margin: headroom, as a share of the budget.
        fits: whether it leaves the margin. If not, the other fields describe the smallest allowed
            plan.
        chance: the chance that a run needs no more than the budget.
        steps: steps in the order of the search.
        settings: settings of all steps.
        before, estimate: estimates without and with the plan.
        time_factor: predicted seconds per iteration with the plan over those without.
        time_range: range of ``time_factor``.
        smallest_budget_gb: smallest budget that leaves the margin, if this one does not.
        must_allow: tiers that would have to be allowed for this budget with its margin; empty if
            none would help.
        evaluation_decides: whether evaluation takes more of the device than training.
        left_out: techniques with which the job does not run, and why; a line each.
        other: the exact plan that fits, if a faster one was asked for.
    """

    budget_gb: float
    margin: float
    fits: bool
    chance: float
    steps: tuple[PlanStep, ...]
    settings: dict[str, Any]
    before: MemoryEstimate
    estimate: MemoryEstimate
    time_factor: float
    time_range: Range
    smallest_budget_gb: Optional[float] = None
    must_allow: tuple[str, ...] = ()
    evaluation_decides: bool = False
    left_out: tuple[str, ...] = ()
    other: Optional[OtherPlan] = None

    @property
    def predicted_gb(self) -> list[float]:
        """Value of MEMFIT.PLAN.PREDICTED_GB: allocated, reserved, and outside the allocator."""
        e = self.estimate
        outside = e.peak_allocated_gb + sum(e.outside.values()) - e.peak_reserved_gb
        return [round(gb, 3) for gb in (e.peak_allocated_gb, e.peak_reserved_gb, outside)]
