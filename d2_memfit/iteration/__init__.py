# Copyright (c) the d2_memfit developers.
"""An iteration in numbers: sizes of batches, bytes by image, averaged weights."""

from .averaged_weights import *
from .cost_model import *
from .geometry import *
