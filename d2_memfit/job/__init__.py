# Copyright (c) the d2_memfit developers.
"""The description of a training job, from a config, a trainer class, a LazyConfig or pieces."""

from .checked_loader import checked_loader, checked_test_loaders
from .job import Job
from .largest import WorstCase
from .normalizer_options import NormalizerOptions
from .real_images import readable_loader, worst_real_images
from .recovery_options import RecoveryOptions

__all__ = [
    "Job",
    "NormalizerOptions",
    "RecoveryOptions",
    "WorstCase",
    "checked_loader",
    "checked_test_loaders",
    "readable_loader",
    "worst_real_images",
]
