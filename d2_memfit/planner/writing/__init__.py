# Copyright (c) the d2_memfit developers.
"""Plans and estimates as text, files and pictures."""

from .drawing import draw_estimate, draw_plan
from .memory_viz import write_memory_snapshot
from .plan_file import budget_in, lazy_file, planned, planned_config, planned_yaml
from .text import describe_estimate, describe_plan, why_it_does_not_fit, why_it_is_tight

__all__ = [
    "budget_in",
    "describe_estimate",
    "describe_plan",
    "draw_estimate",
    "draw_plan",
    "lazy_file",
    "planned",
    "planned_config",
    "planned_yaml",
    "why_it_does_not_fit",
    "why_it_is_tight",
    "write_memory_snapshot",
]
