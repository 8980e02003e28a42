# Copyright (c) the d2_memfit developers.
"""Hooks that watch a run."""

from .leak_detector import *
from .memory_monitor import *
from .memory_snapshot import *
from .monitors import *
