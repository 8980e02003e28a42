# Copyright (c) the d2_memfit developers.
"""Techniques that use less memory, one file each. They know nothing of trainers."""

from .checkpointing import *
from .crowds import *
from .eight_bit import *
from .evaluation_on_host import *
from .fewer_trained import *
from .heads import *
from .host_budget import *
from .masks import *
from .mixed_precision import *
from .modules import *
from .offload import *
from .recipe import *
from .registry import *
from .shared_dataset import *
from .zero import *
