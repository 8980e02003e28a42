# Copyright (c) the d2_memfit developers.
"""An iteration in numbers: sizes of batches, averaged weights."""

from .averaged_weights import *
from .geometry import *
