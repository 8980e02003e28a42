# Copyright (c) the d2_memfit developers.
"""Settings with which PyTorch, cuDNN, oneDNN and NumPy keep less memory, or take it early."""

import os
import sys
from functools import cache
from typing import Optional

import numpy as np
import torch

__all__ = ["limit_library_caches", "segments_expand", "take_library_buffers"]
__all__ += ["use_expandable_segments"]

# The variables with the options of PyTorch's allocator. It reads the second one from 2.11 on.
_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_OPTION = "expandable_segments:True"

# Entries of caches that libraries never empty, and that count towards a budget.
_CACHES = {
    # oneDNN keeps the code of 1024 convolutions, one for each image size: some 400 MB after 120
    # sizes of one convolution. With 64, a step of many sizes takes 5% more time.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    # ideep, between PyTorch and oneDNN, keeps 1024 more (pytorch#29893).
    "LRU_CACHE_CAPACITY": "64",
    # cuDNN keeps 10,000 plans of convolutions in each thread, 200 KB of the host's memory each
    # (ATen/native/cudnn/Conv_v8.cpp). A step of an R50-FPN needs some 200.
    "TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT": "2000",
}


def use_expandable_segments() -> None:
    """Let PyTorch's CUDA allocator grow its segments, against fragmentation.

    It works only before CUDA is started, when PyTorch reads the option. Options set by the user do
    not change.
    """
    if not torch.cuda.is_initialized() and _options() is None:
        os.environ[_NAMES[0]] = _OPTION


def segments_expand(under_budget: bool = True) -> bool:
    """Whether segments grow in this process.

    PyTorch supports this on Linux only.

    Args:
        under_budget: whether :func:`use_expandable_segments` has been or will be called.
    """
    options = _options()
    if options is None and under_budget and not torch.cuda.is_initialized():
        options = _OPTION
    return sys.platform == "linux" and _OPTION in (options or "").replace(" ", "")


def _options() -> Optional[str]:
    return next(filter(None, map(os.environ.get, _NAMES)), None)


def limit_library_caches() -> None:
    """Limit the caches of oneDNN, ideep and cuDNN, unless the user has set a limit.

    They read it at the first convolution. Without memory for its cache, oneDNN may crash, not only
    fail: brgemm_convolution_bwd_strided calls a kernel that was not made, on CPUs with AVX-512.
    """
    for name, limit in _CACHES.items():
        os.environ.setdefault(name, limit)


@cache
def take_library_buffers() -> None:
    """Let libraries take the memory that they cannot do without, before a limit is set.

    OpenBLAS takes a buffer of 32 MB at its first product. Without memory for it, it asks again and
    again, and never returns (blas_memory_alloc in driver/others/memory.c). libgomp ends the process
    if it cannot start a thread (gomp_fatal in libgomp/team.c). oneDNN raises an error, but has
    threads and tables that it takes once.
    """
    square = np.ones((1024, 1024), np.float32)  # large enough for all of OpenBLAS's threads
    _ = square @ square
    _ = torch.from_numpy(square) @ torch.from_numpy(square)  # MKL keeps some 10 MB
    torch.ones(torch.get_num_threads() * 2**15)  # at::internal::GRAIN_SIZE: starts all threads
    image = torch.ones(1, 8, 64, 64, requires_grad=True)
    torch.nn.functional.conv2d(image, torch.ones(8, 8, 3, 3)).sum().backward()
