# Copyright (c) the d2_memfit developers.
"""A training step of full size with exact memory, whose large tensors are never computed."""

from .block_calls import noted_calls
from .dry_run import DryRun, WithoutValues
from .explain import one_line_errors
from .fake import is_fake, make_fake, make_real
from .timeline import (
    Allocate,
    Allocation,
    BlockCall,
    Convolution,
    Event,
    Free,
    Operator,
    Timeline,
    Work,
)
from .worst_outputs import detect_most, worst_case

__all__ = [
    "Allocate",
    "Allocation",
    "BlockCall",
    "Convolution",
    "DryRun",
    "Event",
    "Free",
    "Operator",
    "Timeline",
    "WithoutValues",
    "Work",
    "detect_most",
    "is_fake",
    "make_fake",
    "make_real",
    "noted_calls",
    "one_line_errors",
    "worst_case",
]
