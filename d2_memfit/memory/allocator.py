# Copyright (c) the d2_memfit developers.
"""Settings with which PyTorch, cuDNN, oneDNN and NumPy keep less memory, or take it early."""

import os
import sys
from functools import cache
from typing import Optional

import numpy as np
import torch

__all__ = [
    "limit_cudnn_cache",
    "limit_ideep_cache",
    "limit_onednn_cache",
    "segments_expand",
    "take_library_buffers",
    "use_expandable_segments",
]

_NAME = "PYTORCH_CUDA_ALLOC_CONF"
_NEW_NAME = "PYTORCH_ALLOC_CONF"
# The first PyTorch that also reads CUDA's options by the new name; 2.9 has the name and ignores the
# options (pytorch#183387).
_READS_NEW_NAME = (2, 11)
_OPTION = "expandable_segments:True"

# oneDNN keeps the code of 1024 convolutions, one for each image size: some 400 MB after 120 sizes
# of one convolution. With 64, a step of many sizes takes 5% more time.
_ONEDNN_CONVOLUTIONS = "64"

# ideep, between PyTorch and oneDNN, keeps 1024 more (pytorch#29893). With 64, a step takes as long.
_IDEEP_CONVOLUTIONS = "64"

# cuDNN keeps up to 10,000 plans of convolutions in each thread that runs some, 200 KB of the host's
# memory each (ATen/native/cudnn/Conv_v8.cpp): one for each convolution, direction and size of
# images. The forward and the backward have a thread each. A step of an R50-FPN needs some 200.
_CUDNN_PLANS = "2000"

# Numbers for each thread, from which on PyTorch uses all its threads (at::internal::GRAIN_SIZE).
_PARALLEL_FROM = 2**15


def use_expandable_segments() -> None:
    """Let PyTorch's CUDA allocator grow its segments, against fragmentation.

    It works only before CUDA is started, when PyTorch reads the option. Options set by the user do
    not change.
    """
    if not torch.cuda.is_initialized() and _options() is None:
        os.environ[_NAME] = _options_under_budget()


def segments_expand(under_budget: bool = True) -> bool:
    """Whether segments grow in this process.

    PyTorch supports this on Linux only.

    Args:
        under_budget: whether :func:`use_expandable_segments` has been or will be called.
    """
    options = _options()
    if options is None and under_budget and not torch.cuda.is_initialized():
        options = _options_under_budget()
    return sys.platform == "linux" and _OPTION in (options or "").replace(" ", "")


def _options() -> Optional[str]:
    """The options that this PyTorch reads: the first that are set."""
    names = [_NAME]
    if torch.version.hip:
        names.append("PYTORCH_HIP_ALLOC_CONF")
    if tuple(map(int, torch.__version__.split(".")[:2])) >= _READS_NEW_NAME:
        names.append(_NEW_NAME)
    return next(filter(None, map(os.environ.get, names)), None)


def _options_under_budget() -> str:
    """The user's options under a name that this PyTorch does not read, or ours."""
    return os.environ.get(_NEW_NAME) or _OPTION


def limit_onednn_cache() -> None:
    """Limit oneDNN's cache of convolution code, unless the user has set a limit, and ideep's.

    oneDNN reads the limit at the first convolution on the CPU. The code counts towards a budget,
    and nothing empties the cache. Without memory for it, some convolutions crash, not only fail. In
    oneDNN 3, brgemm_convolution_bwd_strided calls a kernel that was not made: SIGSEGV in
    brgemm_kernel_execute, on CPUs with AVX-512.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _ONEDNN_CONVOLUTIONS)
    limit_ideep_cache()


def limit_ideep_cache() -> None:
    """Limit ideep's cache of convolutions on the CPU, unless the user has set a limit.

    PyTorch reads the limit at the process's first convolution on the CPU, or when the number of
    threads is first set.
    """
    os.environ.setdefault("LRU_CACHE_CAPACITY", _IDEEP_CONVOLUTIONS)


def limit_cudnn_cache() -> None:
    """Limit cuDNN's cache of convolution plans, unless the user has set a limit.

    PyTorch reads the limit at the process's first convolution on a GPU.
    """
    os.environ.setdefault("TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT", _CUDNN_PLANS)


@cache
def take_library_buffers() -> None:
    """Let libraries take the memory that they cannot do without, before a limit is set.

    OpenBLAS takes a buffer of 32 MB at its first product. Without memory for it, it asks again and
    again, and never returns (blas_memory_alloc in driver/others/memory.c). SciPy has an OpenBLAS of
    its own. libgomp ends the process if it cannot start a thread (gomp_fatal in libgomp/team.c).
    oneDNN and OpenCV raise an error, but each has threads and tables that it takes once.
    """
    square = np.ones((1024, 1024), np.float32)  # large enough for all of OpenBLAS's threads
    _ = square @ square
    _ = torch.from_numpy(square) @ torch.from_numpy(square)  # MKL keeps some 10 MB
    if "scipy.linalg" in sys.modules:
        sys.modules["scipy.linalg"].blas.sgemm(1.0, square, square)
    torch.ones(torch.get_num_threads() * _PARALLEL_FROM)
    image = torch.ones(1, 8, 64, 64, requires_grad=True)
    torch.nn.functional.conv2d(image, torch.ones(8, 8, 3, 3)).sum().backward()
    if "cv2" in sys.modules:
        sys.modules["cv2"].GaussianBlur(np.zeros((1024, 1024, 3), np.uint8), (5, 5), 1)
