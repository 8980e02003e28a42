# Copyright (c) the d2_memfit developers.
"""Hooks that watch a run."""

from .best_checkpoint import BestCheckpoint
from .explained_hooks import explains_hooks
from .leak_detector import LeakDetector
from .memory_monitor import MemoryMonitor
from .memory_snapshot import MemorySnapshot
from .monitors import job_hooks
from .not_finite import likely_cause
from .number_formats import compare_number_formats

__all__ = [
    "BestCheckpoint",
    "LeakDetector",
    "MemoryMonitor",
    "MemorySnapshot",
    "compare_number_formats",
    "explains_hooks",
    "job_hooks",
    "likely_cause",
]
