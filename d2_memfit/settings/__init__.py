# Copyright (c) the d2_memfit developers.
"""What a run is told: parsed, checked and typed once, from a config, a LazyConfig or arguments."""

from .lazy import *
from .precision import *
from .rules import *
from .scaling import *
from .settings import *
