# Copyright (c) the d2_memfit developers.
"""Shared parts of techniques: blocks, modules, objects, state, recomputation."""

from .blocks import *
from .in_forward import *
from .modules import *
from .objects import *
from .packed_masks import *
from .recomputation import *
