# Copyright (c) the d2_memfit developers.
"""The settings of a run: parsed and checked once, from a config, a LazyConfig or arguments."""

from ..config import check_arguments as check_arguments
from .lazy import *
from .precision import *
from .settings import *
