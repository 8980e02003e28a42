# Copyright (c) the d2_memfit developers.
"""The images of one optimizer step, and how they are cut into micro-batches."""

from .byte_cut import *
from .columns import *
from .micro_batch_size import *
from .quickest_cuts import *
from .storage import *
from .window import *
