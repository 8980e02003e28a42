# Copyright (c) the d2_memfit developers.
"""The images of one optimizer step, and how they are cut into micro-batches."""

from .columns import *
from .cutter import *
from .storage import *
from .window import *
