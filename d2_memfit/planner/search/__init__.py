# Copyright (c) the d2_memfit developers.
"""The search for the plan that changes least and is fastest."""

from .cost_fit import CostFit
from .plan import OtherPlan, Plan, PlanStep
from .search import Planner, plan_memory
from .selective import BLOCKWISE, with_best_blocks
from .trials import Choice, Trials, choice_of, preference

__all__ = [
    "BLOCKWISE",
    "Choice",
    "CostFit",
    "OtherPlan",
    "Plan",
    "PlanStep",
    "Planner",
    "Trials",
    "choice_of",
    "plan_memory",
    "preference",
    "with_best_blocks",
]
