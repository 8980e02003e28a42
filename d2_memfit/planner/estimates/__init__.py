# Copyright (c) the d2_memfit developers.
"""The memory of one job: its step run dry, and what that takes of a device."""

from .dry_job import DryJob, MemoryEstimate
from .estimate import estimate_memory, run_dry
from .from_runs import as_in_runs
from .probe import job_class, run_for_real
from .ranges import OF_MARGIN, margin_of
from .steps import build_with_values, evaluate, infer
from .times import Range, factor_range, in_words

__all__ = [
    "OF_MARGIN",
    "DryJob",
    "MemoryEstimate",
    "Range",
    "as_in_runs",
    "build_with_values",
    "estimate_memory",
    "evaluate",
    "factor_range",
    "in_words",
    "infer",
    "job_class",
    "margin_of",
    "run_dry",
    "run_for_real",
]
