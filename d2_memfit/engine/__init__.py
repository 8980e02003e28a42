# Copyright (c) the d2_memfit developers.
"""Training: one window of images per iteration, with recovery from out-of-memory errors."""

from ..settings import NormalizerOptions, Precision, RecoveryOptions
from .attempts import recovering_inference
from .build import build_trainer
from .checkpoint import MemfitCheckpointer
from .defaults import MemfitMixin, MemfitTrainer
from .ending import SaveOnEnding
from .evaluating import evaluating
from .hooks import GatherStates, LeakDetector, MemoryMonitor, MemorySnapshot
from .launch import launch, usable_device, world_size
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
