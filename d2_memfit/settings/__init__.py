# Copyright (c) the d2_memfit developers.
"""The settings of a run: parsed and checked once, from a config, a LazyConfig or arguments."""

from .key_checks import *
from .lazy import *
from .precision import *
from .scaling import *
from .settings import *
