# Copyright (c) the d2_memfit developers.
"""What losses may be divided by: counts of a model, and what its ranks tell each other."""

from .collectives import *
from .window_counts import *
