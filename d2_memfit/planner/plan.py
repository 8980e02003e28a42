"""What a plan is: changes to a config, and what the job then needs."""

from dataclasses import dataclass
from typing import Any, Optional

from .dry_job import MemoryEstimate

__all__ = ["OtherPlan", "Plan", "PlanStep"]


@dataclass(frozen=True)
class PlanStep:
    """One change.

    Attributes:
        name: of a technique, or "smaller micro-batches".
        tier: "exact", "precision" or "recipe".
        settings: config keys and their new values.
        what: what it changes in training, for the tiers that are not exact.
        gb_before, gb_after: what the process takes of the device, without this step and those after
            it, and with it.
        time_factor: seconds of an iteration with it, divided by those without.
    """

    name: str
    tier: str
    settings: dict[str, Any]
    what: str
    gb_before: float
    gb_after: float
    time_factor: float


@dataclass(frozen=True)
class OtherPlan:
    """What else fits.

    Attributes:
        settings: of all of its steps together.
        device_total_gb, time_factor: as for a :class:`Plan`.
    """

    settings: dict[str, Any]
    device_total_gb: float
    time_factor: float


@dataclass(frozen=True)
class Plan:
    """Changes that make a job fit, and what it then needs.

    Attributes:
        budget_gb: of the device, for the whole process.
        margin: share of the budget that is left free.
        fits: whether the job fits. If not, the rest is about the smallest one that was allowed.
        steps: in the order in which they were tried.
        settings: of all steps together.
        before, estimate: without and with the plan.
        time_factor: seconds of an iteration with the plan, divided by those without.
        smallest_budget_gb: that would do, if it does not fit.
        must_allow: tiers that would have to be allowed for this budget; empty if none would help.
        evaluation_decides: whether evaluation takes more of the device than training.
        left_out: techniques with which the job does not run, and why; a line each.
        exact: the fastest plan of the exact tier, if that fits and this one is faster.
        cost_model: by which windows are cut, as a line; "" where they are not cut by bytes.
    """

    budget_gb: float
    margin: float
    fits: bool
    steps: tuple[PlanStep, ...]
    settings: dict[str, Any]
    before: MemoryEstimate
    estimate: MemoryEstimate
    time_factor: float
    smallest_budget_gb: Optional[float] = None
    must_allow: tuple[str, ...] = ()
    evaluation_decides: bool = False
    left_out: tuple[str, ...] = ()
    exact: Optional[OtherPlan] = None
    cost_model: str = ""
