# Copyright (c) the d2_memfit developers.
"""Training: one window of images per iteration, with recovery from out-of-memory errors."""

from ..job.normalizer_options import NormalizerOptions
from ..job.recovery_options import RecoveryOptions
from ..precision import Precision
from .build import build_trainer
from .checkpoint import MemfitCheckpointer
from .defaults import MemfitMixin, MemfitTrainer
from .ending import SaveOnEnding
from .evaluating import evaluating
from .inference import recovering_inference
from .launch import launch, usable_device, world_size
from .leak_detector import LeakDetector
from .memory_monitor import MemoryMonitor
from .memory_snapshot import MemorySnapshot
from .resumable_trainer import GatherStates
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
