# Copyright (c) the d2_memfit developers.
"""Devices as data: allocator, workspaces, context."""

from .allocators import *
from .device_model import *
