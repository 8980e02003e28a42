# Copyright (c) the d2_memfit developers.
"""An iteration in numbers: sizes of batches, bytes by image."""

from .cost_model import *
from .geometry import *
