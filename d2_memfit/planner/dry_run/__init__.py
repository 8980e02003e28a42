# Copyright (c) the d2_memfit developers.
"""A training step of full size with exact memory, whose large tensors are never computed."""

from .block_calls import *
from .dry_run import *
from .explain import *
from .fake import *
from .timeline import *
from .worst_outputs import *
