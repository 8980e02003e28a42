# Copyright (c) the d2_memfit developers.
"""Techniques that use less memory, one file each. They know nothing of trainers."""

from importlib import import_module
from pkgutil import iter_modules

from .activation_checkpointing import checkpointed
from .chunked_matching import ChunkedMatcher, PairwiseQuality
from .evaluation_on_host import can_have_results_on_host, results_on_host
from .host_budget import loader_bytes, workers_bytes
from .registry import (
    TECHNIQUES,
    TIERS,
    Technique,
    apply_techniques,
    get_technique,
    ready_to_evaluate,
    techniques_on,
)
from .resize import resize_image
from .shared_dataset import SharedDataset
from .support import ModuleState, plain_attributes
from .zero import ShardedOptimizer

__all__ = [
    "TECHNIQUES",
    "TIERS",
    "ChunkedMatcher",
    "ModuleState",
    "PairwiseQuality",
    "ShardedOptimizer",
    "SharedDataset",
    "Technique",
    "apply_techniques",
    "can_have_results_on_host",
    "checkpointed",
    "get_technique",
    "loader_bytes",
    "plain_attributes",
    "ready_to_evaluate",
    "resize_image",
    "results_on_host",
    "techniques_on",
    "workers_bytes",
]

for _module in iter_modules(__path__):  # each registers its techniques
    import_module(f"{__name__}.{_module.name}")
