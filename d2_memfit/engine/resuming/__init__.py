# Copyright (c) the d2_memfit developers.
"""Checkpoints, exact resume, and endings that save."""

from .checkpoint import *
from .ending import *
from .resumable_batches import *
from .resumable_trainer import *
from .signals import *
