# Copyright (c) the d2_memfit developers.
"""An iteration in numbers: sizes of batches, workers, bytes by image, number formats."""

from .averaged_weights import *
from .cost_model import *
from .geometry import *
from .precision import *
from .scaling import *
