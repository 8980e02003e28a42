"""A budget of memory that a job cannot exceed."""

import ctypes
import logging
import math
import numbers
import os
import sys
from typing import Any, Optional, Union

import torch

from ..errors import ConfigError
from .meter import process_memory

__all__ = [
    "check_budget",
    "cuda_context_bytes",
    "enforce_budget",
    "return_large_blocks",
    "use_expandable_segments",
]

logger = logging.getLogger(__name__)

_GB = 2**30

# What a process takes of a GPU before its first tensor: the CUDA context and the code of kernels.
# 0.3 to 0.6 GB, depending on card, driver and PyTorch; it is measured where nothing else runs.
_LARGEST_CONTEXT_GB = 0.75

# glibc serves blocks below a threshold, which grows to 32 MiB, from a heap that cannot shrink while
# its last block is in use. Above it, each block goes back to the system when it is freed.
_MMAP_THRESHOLD_BYTES = 2**20
_M_MMAP_THRESHOLD = -3  # <malloc.h>

_enforced: dict[str, float] = {}  # GB by device; an evaluation asks for it again


def check_budget(budget_gb: Any) -> None:
    """Raise :class:`ConfigError` unless it is a number above 0, or None."""
    is_number = isinstance(budget_gb, numbers.Real) and not isinstance(budget_gb, bool)
    if budget_gb is not None and not (is_number and 0 < budget_gb < math.inf):
        raise ConfigError(
            f"MEMFIT.BUDGET_GB must be a number of GB above 0, such as 6 or 7.5, got {budget_gb!r}"
        )


def enforce_budget(budget_gb: Optional[float], device: str) -> None:
    """Make it impossible that this process takes more than ``budget_gb`` of the device's memory.

    On a GPU this limits PyTorch's allocator. The CUDA context counts too; memory that other
    libraries take by themselves does not. On a Linux CPU it is the kernel's limit on the data of
    the process (RLIMIT_DATA), and of each process it starts, such as the loader's workers: all
    private memory, whether touched or not, with what the imports have taken. On other systems it
    is not enforced, and a warning says so.

    Args:
        budget_gb: in 2^30 bytes. None changes nothing.
        device: as in MODEL.DEVICE.

    Raises:
        ConfigError: it is no number above 0, the device has less memory, or the process takes more
            already.
    """
    check_budget(budget_gb)
    if budget_gb is None or _enforced.get(device) == budget_gb:
        return
    _enforced[device] = budget_gb
    kind = torch.device(device).type
    if kind == "cuda":
        index = torch.device(device).index
        _limit_cuda(budget_gb, torch.cuda.current_device() if index is None else index)
    elif kind == "cpu" and sys.platform == "linux":
        _limit_process(budget_gb)
    else:
        logger.warning(
            "MEMFIT.BUDGET_GB %g is not enforced on the device %s of %s",
            budget_gb,
            device,
            sys.platform,
        )


def use_expandable_segments() -> None:
    """Let PyTorch's CUDA allocator grow its segments, against fragmentation.

    Only before CUDA is started; options that the user has set stay as they are.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if not any(name in os.environ for name in names):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def return_large_blocks() -> None:
    """From now on, blocks above a threshold go back to the system as soon as they are freed."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):  # glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


def _limit_cuda(budget_gb: float, device: int) -> None:
    free, total = (n / _GB for n in torch.cuda.mem_get_info(device))
    if budget_gb > total:
        raise ConfigError(
            f"MEMFIT.BUDGET_GB {budget_gb:g} is more than the {total:.2f} GB of "
            f"{torch.cuda.get_device_name(device)}"
        )
    taken = total - free - torch.cuda.memory_reserved(device) / _GB
    context = cuda_context_bytes(device) / _GB
    if budget_gb <= context:
        raise ConfigError(
            f"MEMFIT.BUDGET_GB {budget_gb:g} does not hold the CUDA context, {context:.2f} GB"
        )
    available = total - taken + context
    if available < budget_gb:
        logger.warning(
            "MEMFIT.BUDGET_GB %g: other processes use the GPU, and only %.2f GB are left",
            budget_gb,
            available,
        )
    torch.cuda.set_per_process_memory_fraction((budget_gb - context) / total, device)


def cuda_context_bytes(device: Union[torch.device, int]) -> int:
    """What the process takes of a GPU beside its tensors; where others use the GPU, at most."""
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free - torch.cuda.memory_reserved(device)
    return min(taken, int(_LARGEST_CONTEXT_GB * _GB))


def _limit_process(budget_gb: float) -> None:
    import resource

    data_bytes = process_memory().data_bytes
    if budget_gb * _GB <= data_bytes:
        raise ConfigError(
            f"MEMFIT.BUDGET_GB {budget_gb:g} is not more than the {data_bytes / _GB:.2f} GB that "
            "the process takes before training"
        )
    return_large_blocks()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([int(budget_gb * _GB), *limits]), hard))
