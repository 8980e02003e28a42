"""Training: one window of images per iteration, whatever the memory."""

from .checkpoint import MemfitCheckpointer
from .defaults import MemfitMixin, MemfitTrainer
from .inference import recovering_inference
from .launch import launch, usable_device, world_size
from .precision import Precision
from .recovery_options import RecoveryOptions
from .train_loop import AccumulatingTrainer

__all__ = [
    "AccumulatingTrainer",
    "MemfitCheckpointer",
    "MemfitMixin",
    "MemfitTrainer",
    "Precision",
    "RecoveryOptions",
    "launch",
    "recovering_inference",
    "usable_device",
    "world_size",
]
