# Copyright (c) the d2_memfit developers.
"""Limits for the caches that libraries keep on the host for each new shape."""

import os

__all__ = ["limit_cudnn_cache", "limit_onednn_cache"]

# oneDNN keeps the code of 1024 convolutions, one for each image size: some 400 MB after 120 sizes
# of one convolution. With 64, a step of many sizes takes 5% more time.
_ONEDNN_CONVOLUTIONS = "64"

# cuDNN keeps up to 10,000 plans of convolutions in each thread that runs some, 200 KB of the host's
# memory each (ATen/native/cudnn/Conv_v8.cpp): one for each convolution, direction and size of
# images. The forward and the backward have a thread each. A step of an R50-FPN needs some 200.
_CUDNN_PLANS = "2000"


def limit_onednn_cache() -> None:
    """Limit oneDNN's cache of convolution code, unless the user has set a limit.

    oneDNN reads the limit at the first convolution on the CPU. The code counts towards a budget,
    and nothing empties the cache. If there is no memory for it, some convolutions crash instead of
    failing: brgemm_convolution_bwd_strided of oneDNN 3 calls a kernel that was not made (SIGSEGV in
    brgemm_kernel_execute, on CPUs with AVX-512).
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _ONEDNN_CONVOLUTIONS)


def limit_cudnn_cache() -> None:
    """Limit cuDNN's cache of convolution plans, unless the user has set a limit.

    PyTorch reads the limit at the process's first convolution on a GPU.
    """
    os.environ.setdefault("TORCH_CUDNN_V8_API_LRU_CACHE_LIMIT", _CUDNN_PLANS)
