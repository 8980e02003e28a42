# Copyright (c) the d2_memfit developers.
"""Devices as data: allocator, workspaces, context."""

from .allocators import Block, CachingAllocator, DoesNotFit
from .device_model import DeviceModel, DeviceUse, device_names

__all__ = [
    "Block",
    "CachingAllocator",
    "DeviceModel",
    "DeviceUse",
    "DoesNotFit",
    "device_names",
]
