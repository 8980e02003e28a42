# Copyright (c) the d2_memfit developers.
"""Measuring and limiting memory, and handling out-of-memory errors."""

from .budget import *
from .meter import *
from .oom import *
from .readings import *
