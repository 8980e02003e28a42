# Copyright (c) the d2_memfit developers.
"""Training: one window of images per iteration, with recovery from out-of-memory errors."""

from ..job.normalizer_options import NormalizerOptions
from ..job.recovery_options import RecoveryOptions
from ..precision import Precision
from .build import build_trainer
from .checkpoint import MemfitCheckpointer
from .defaults import MemfitMixin, MemfitTrainer
from .gather_states import GatherStates
from .hooks import memory_hooks
from .inference import recovering_inference
from .launch import launch, usable_device, world_size
from .leak_detector import LeakDetector
from .memory_monitor import MemoryMonitor
from .memory_snapshot import MemorySnapshot
from .preemption import StopOnSignals
from .sharding import ConsolidateOptimizer
from .train_loop import AccumulatingTrainer

__all__ = [
    "AccumulatingTrainer",
    "ConsolidateOptimizer",
    "GatherStates",
    "LeakDetector",
    "MemfitCheckpointer",
    "MemfitMixin",
    "MemfitTrainer",
    "MemoryMonitor",
    "MemorySnapshot",
    "NormalizerOptions",
    "Precision",
    "RecoveryOptions",
    "StopOnSignals",
    "build_trainer",
    "launch",
    "memory_hooks",
    "recovering_inference",
    "usable_device",
    "world_size",
]
