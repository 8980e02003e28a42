# Copyright (c) the d2_memfit developers.
"""Training: one window of images per iteration, with recovery from out-of-memory errors."""

from ..config.precision import Precision
from ..config.settings import NormalizerOptions, RecoveryOptions
from .build import build_trainer
from .checkpoint import MemfitCheckpointer
from .defaults import MemfitMixin, MemfitTrainer
from .ending import SaveOnEnding
from .evaluating import evaluating, recovering_inference
from .hooks import LeakDetector, MemoryMonitor, MemorySnapshot
from .launch import launch, usable_device, world_size
from .run_state import GatherStates
from .train_loop import AccumulatingTrainer

__all__ = [
    "AccumulatingTrainer",
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
    "SaveOnEnding",
    "build_trainer",
    "evaluating",
    "launch",
    "recovering_inference",
    "usable_device",
    "world_size",
]
