# Copyright (c) the d2_memfit developers.
"""Checkpoints, exact resume, and endings that save."""

from .checkpoint import MemfitCheckpointer
from .ending import SaveOnEnding
from .resumable_batches import ResumableBatches, UnknownLoader
from .resumable_trainer import GatherStates, Progress, ResumableTrainer, TrainingEnded
from .signals import end_with_launcher, handle, raising_handlers_held_back, signals_passed_on

__all__ = [
    "GatherStates",
    "MemfitCheckpointer",
    "Progress",
    "ResumableBatches",
    "ResumableTrainer",
    "SaveOnEnding",
    "TrainingEnded",
    "UnknownLoader",
    "end_with_launcher",
    "handle",
    "raising_handlers_held_back",
    "signals_passed_on",
]
