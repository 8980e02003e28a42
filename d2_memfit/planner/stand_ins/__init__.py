# Copyright (c) the d2_memfit developers.
"""A dry run's replacements of CUDA, autocast, compiled operators and matching."""

from .autocast import casts_of_cuda
from .compiled_operators import compiled_operators
from .cuda_as_cpu import cuda_as_cpu
from .matching import fast_matching

__all__ = [
    "casts_of_cuda",
    "compiled_operators",
    "cuda_as_cpu",
    "fast_matching",
]
