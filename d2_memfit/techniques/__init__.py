# Copyright (c) the d2_memfit developers.
"""Techniques that use less memory, one file each. They know nothing of trainers."""

from importlib import import_module
from pkgutil import iter_modules

from .activation_checkpointing import *
from .adapters import *
from .chunked_matching import *
from .evaluation_on_host import *
from .host_budget import *
from .offload import *
from .registry import *
from .shared_dataset import *
from .zero import *

for _module in iter_modules(__path__):  # each registers its techniques
    import_module(f"{__name__}.{_module.name}")
