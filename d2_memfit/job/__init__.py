# Copyright (c) the d2_memfit developers.
"""The description of a training job, from a config, a trainer class, a LazyConfig or pieces."""

from .checked_loader import checked_loader, checked_test_loaders
from .job import Job
from .normalizer_options import NormalizerOptions
from .recovery_options import RecoveryOptions
from .worst_case import WorstCase, worst_case

__all__ = [
    "Job",
    "NormalizerOptions",
    "RecoveryOptions",
    "WorstCase",
    "checked_loader",
    "checked_test_loaders",
    "worst_case",
]
