# Copyright (c) the d2_memfit developers.
"""Shared parts of techniques: blocks, modules, objects, state, recomputation."""

from .blocks import find_blocks
from .module_state import LARGE_BYTES, MOST_BYTES, ModuleState, plain_attributes
from .modules import add_mixin, find_modules
from .objects import chunks_of, device_of, is_targets, objects_per_image, take_objects
from .recomputation import recompute_in_backward

__all__ = [
    "LARGE_BYTES",
    "MOST_BYTES",
    "ModuleState",
    "add_mixin",
    "chunks_of",
    "device_of",
    "find_blocks",
    "find_modules",
    "is_targets",
    "objects_per_image",
    "plain_attributes",
    "recompute_in_backward",
    "take_objects",
]
