# Copyright (c) the d2_memfit developers.
"""Evaluation that needs less host memory, and counts objects that COCO's API would miss."""

from .evaluation import *
from .in_parts import *
