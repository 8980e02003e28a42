# Copyright (c) the d2_memfit developers.
"""Estimates and plans of a job's memory, made before training and without a GPU."""

from ..job import WorstCase
from .dry_job import DryJob, MemoryEstimate
from .estimate import estimate_memory
from .plan import Plan, PlanStep
from .planned_run import fit_config
from .search import Planner, plan_memory

__all__ = [
    "DryJob",
    "MemoryEstimate",
    "Plan",
    "PlanStep",
    "Planner",
    "WorstCase",
    "estimate_memory",
    "fit_config",
    "plan_memory",
]
