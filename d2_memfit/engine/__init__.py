"""Training: one window of images per iteration, whatever the memory."""

from .checkpoint import MemfitCheckpointer
from .defaults import MemfitMixin, MemfitTrainer
from .launch import launch, usable_device, world_size
from .precision import Precision
from .train_loop import AccumulatingTrainer

__all__ = [
    "AccumulatingTrainer",
    "MemfitCheckpointer",
    "MemfitMixin",
    "MemfitTrainer",
    "Precision",
    "launch",
    "usable_device",
    "world_size",
]
