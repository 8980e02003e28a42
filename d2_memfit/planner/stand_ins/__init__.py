# Copyright (c) the d2_memfit developers.
"""A dry run's replacements of CUDA, autocast, compiled operators, matching."""

from .autocast import *
from .compiled_operators import *
from .cuda_as_cpu import *
from .matching import *
