# Copyright (c) the d2_memfit developers.
"""Devices as data: allocator, workspaces, context."""

from .allocators import DoesNotFit
from .calibration import calibrate
from .device_model import DeviceModel, DeviceUse, device_names

__all__ = [
    "DeviceModel",
    "DeviceUse",
    "DoesNotFit",
    "calibrate",
    "device_names",
]
