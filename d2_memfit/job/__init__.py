# Copyright (c) the d2_memfit developers.
"""The description of a training job, from a config, a trainer class, a LazyConfig or pieces."""

from .batches import *
from .checked_loader import *
from .job import *
from .largest_images import *
from .lazy import *
from .losses import *
from .projects import *
from .real_images import *
from .resize import *
