# Copyright (c) the d2_memfit developers.
"""A memory budget that a job cannot exceed, and settings with which libraries keep less memory."""

import ctypes
import logging
import math
import os
import sys
from functools import cache
from typing import Any, Optional, Union

import numpy as np
import torch
import torch.distributed as dist

from ..common import GB
from ..common.errors import ConfigError
from .readings import available_host_bytes, process_memory

__all__ = ["auto_budget_gb", "cuda_context_bytes", "enforce_budget"]
__all__ += ["limit_library_caches", "return_large_blocks", "segments_expand"]
__all__ += ["take_library_buffers", "use_expandable_segments"]

logger = logging.getLogger(__name__)


# Upper limits of a process's GPU memory without its tensors. CUDA does not tell it from the memory
# of other processes, so what is above the limit belongs to others.
# CUDA context and kernels: 0.3 to 0.6 GB, by card, driver and PyTorch (pytorch#107667, #109888).
_LARGEST_CONTEXT_GB = 1.0
# NCCL's buffers, with several ranks: 0.5 to 1.6 GB (nccl#964, #864, #1685).
_LARGEST_NCCL_GB = 1.6

# Free memory that "auto" does not use. On a GPU it is for kernels that are loaded later and for a
# desktop; on the host it is for other programs.
_FREE_ON_GPU_GB = 0.25
_FREE_ON_HOST_GB = 0.5

# glibc serves blocks below a threshold, which grows to 32 MiB, from a heap that cannot shrink while
# its last block is in use. Above it, each block goes back to the system when it is freed.
_MMAP_THRESHOLD_BYTES = 2**20
_M_MMAP_THRESHOLD = -3  # <malloc.h>

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

# By device, the limit that a budget has replaced.
_replaced: dict[str, Any] = {}


def auto_budget_gb(device: str, ranks_here: int = 1, host_bytes: float = 0) -> float:
    """The budget that "auto" stands for, in GB.

    It is the free memory plus the memory of this process, less a margin. On a GPU the CUDA context
    is started first. On the CPU it is the available RAM, divided by the ranks of the machine. The
    limits of a container count (cgroup v1 and v2), and so does one of the process (ulimit -d).

    Args:
        device: as in MODEL.DEVICE.
        ranks_here: number of ranks on this machine.
        host_bytes: RAM for other processes of each rank, such as the loader's workers.

    Raises:
        ConfigError: there is no such GPU, or nothing is left.
    """
    kind = torch.device(device).type
    free = taken = 0.0
    if kind == "cuda" and torch.cuda.is_available():
        use_expandable_segments()
        free = torch.cuda.mem_get_info(_index(device))[0] - _FREE_ON_GPU_GB * GB
        taken = torch.cuda.memory_reserved(_index(device)) + cuda_context_bytes(device)
    elif kind == "cpu":
        taken = process_memory().data_bytes
        free = (available_host_bytes() - _FREE_ON_HOST_GB * GB) / ranks_here - host_bytes
        free = min(free, _limit_of_process() - taken)
    if free <= 0:
        raise ConfigError(
            f"MEMFIT.BUDGET_GB auto: nothing is free on the device {device}, or it is not visible. "
            "End the processes that use it, or lower DATALOADER.NUM_WORKERS on a CPU; or name a "
            "budget in GB, or a card: --card 6GB"
        )
    text = "MEMFIT.BUDGET_GB auto on the device %s: %.2f GB, of which %.2f GB are taken already"
    logger.info(text, device, (free + taken) / GB, taken / GB)
    return (free + taken) / GB


def enforce_budget(budget_gb: Optional[float], device: str) -> None:
    """Limit the memory that this process can take of a device to ``budget_gb``.

    On a GPU this limits PyTorch's allocator to the budget, less the CUDA context and other
    libraries' current memory. Call it again when that may have grown, as the hook ``EnforceBudget``
    does. Kernels and NCCL's buffers are loaded at first use.

    On a Linux CPU it sets the kernel's limit on the data of the process (RLIMIT_DATA). Processes
    that it starts, such as the loader's workers, have the same limit each. The limit counts all
    private memory, touched or not, including that of imports. On other systems the budget is not
    enforced, and a warning says so.

    Args:
        budget_gb: in 2^30 bytes. None removes the limit of an earlier call.
        device: as in MODEL.DEVICE.

    Raises:
        ConfigError: it is not above 0, the device has less memory, or the process takes
            more already. The limit then does not change.
    """
    kind = torch.device(device).type
    if kind == "cuda" and (budget_gb is not None or _replaced):
        _limit_cuda(budget_gb, device)
    elif kind == "cpu" and sys.platform == "linux":
        _limit_process(budget_gb)
    elif budget_gb is not None:
        text = "MEMFIT.BUDGET_GB %g is not enforced on the device %s of %s"
        logger.warning(text, budget_gb, device, sys.platform)


def return_large_blocks() -> None:
    """Make large freed blocks return to the system at once, from now on."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):  # glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


def cuda_context_bytes(device: Union[torch.device, str]) -> int:
    """GPU memory of the process without its tensors; an upper limit if others use the GPU."""
    index = _index(device)
    free, total = torch.cuda.mem_get_info(index)
    taken = total - free - torch.cuda.memory_reserved(index)
    has_nccl = dist.is_available() and dist.is_initialized() and dist.get_backend() == "nccl"
    most = int((_LARGEST_CONTEXT_GB + (_LARGEST_NCCL_GB if has_nccl else 0)) * GB)
    return min(taken, most)


def _index(device: Union[torch.device, str]) -> int:
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def _limit_cuda(budget_gb: Optional[float], device: str) -> None:
    index = _index(device)
    if budget_gb is None:
        torch.cuda.set_per_process_memory_fraction(_replaced.pop(f"cuda:{index}", 1.0), index)
        return
    use_expandable_segments()
    free, total = (n / GB for n in torch.cuda.mem_get_info(index))
    context = cuda_context_bytes(device) / GB
    if not context < budget_gb <= total:
        raise ConfigError(
            f"MEMFIT.BUDGET_GB {budget_gb:g} is more than the {total:.2f} GB of "
            f"{torch.cuda.get_device_name(index)}, or less than its CUDA context, {context:.2f} "
            "GB. Name the card's size: --card 6GB for one that is sold with 6 GB"
        )
    available = free + torch.cuda.memory_reserved(index) / GB + context
    if available < budget_gb:
        text = "MEMFIT.BUDGET_GB %g: others leave %.2f GB of the GPU. End them (nvidia-smi)"
        logger.warning(text, budget_gb, available)
    limit_library_caches()
    share = (budget_gb - context) / total
    torch.cuda.set_per_process_memory_fraction(share, index)
    if f"cuda:{index}" not in _replaced:
        text = "MEMFIT.BUDGET_GB %.4g: PyTorch's allocator may take %.2f GB of the GPU"
        logger.info(text, budget_gb, share * total)
    _replaced[f"cuda:{index}"] = 1.0


def _limit_of_process() -> float:
    """Limit of the process's private memory (ulimit -d), in bytes, without the budget."""
    if sys.platform != "linux":
        return math.inf
    import resource

    limit = _replaced.get("cpu", resource.getrlimit(resource.RLIMIT_DATA)[0])
    return math.inf if limit == resource.RLIM_INFINITY else limit


def _limit_process(budget_gb: Optional[float]) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if budget_gb is not None or _replaced.get("cpu", soft) != resource.RLIM_INFINITY:  # ulimit -d
        limit_library_caches()
        take_library_buffers()
        return_large_blocks()
    if budget_gb is None:
        resource.setrlimit(resource.RLIMIT_DATA, (_replaced.pop("cpu", soft), hard))
        return
    taken = process_memory().data_bytes
    if budget_gb * GB <= taken:
        raise ConfigError(
            f"MEMFIT.BUDGET_GB {budget_gb:g} is not more than the {taken / GB:.2f} GB that the "
            "process takes before training"
        )
    limit = int(budget_gb * GB) if hard < 0 else min(int(budget_gb * GB), hard)  # -1: none
    _replaced.setdefault("cpu", soft)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    logger.info("MEMFIT.BUDGET_GB %.4g: %.2f GB are taken already", limit / GB, taken / GB)


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
