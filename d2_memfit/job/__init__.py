# Copyright (c) the d2_memfit developers.
"""The description of a training job, from a config, a trainer class, a LazyConfig or pieces."""

from .datasets import *
from .given import *
from .job import *
from .loader import *
from .mapper import *
from .parts import *
from .worst_batch import *
