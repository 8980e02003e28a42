"""Training: one window of images per iteration, whatever the memory."""

from ..precision import Precision
from .checkpoint import MemfitCheckpointer
from .defaults import MemfitMixin, MemfitTrainer
from .hooks import (
    LeakDetector,
    MemoryMonitor,
    MemorySnapshot,
    memory_hooks,
)
from .inference import recovering_inference
from .launch import launch, usable_device, world_size
from .recovery_options import RecoveryOptions
from .sharding import ConsolidateOptimizer
from .train_loop import AccumulatingTrainer

__all__ = [
    "AccumulatingTrainer",
    "ConsolidateOptimizer",
    "LeakDetector",
    "MemfitCheckpointer",
    "MemfitMixin",
    "MemfitTrainer",
    "MemoryMonitor",
    "MemorySnapshot",
    "Precision",
    "RecoveryOptions",
    "launch",
    "memory_hooks",
    "recovering_inference",
    "usable_device",
    "world_size",
]
