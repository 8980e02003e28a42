# Copyright (c) the d2_memfit developers.
"""Detection of out-of-memory errors among other errors."""

import re
from dataclasses import dataclass

import torch

__all__ = [
    "error_line",
    "is_killed_worker",
    "is_loader_out_of_memory",
    "is_lost_rank",
    "is_out_of_memory",
]


@dataclass(frozen=True)
class _ErrorPattern:
    """A text that marks an out-of-memory error, with its source."""

    pattern: str
    source: str
    only_under_limit: bool = False  # without a limit on the process, it has other causes, too


# RuntimeErrors, by their texts. torch.OutOfMemoryError and MemoryError are known by their types.
_DEVICE_ERRORS = (
    _ErrorPattern(
        r"CUDA out of memory", "c10/cuda/CUDACachingAllocator.cpp, before PyTorch 1.13 no class"
    ),
    _ErrorPattern(
        r"CUDA error: out of memory", "cudaErrorMemoryAllocation, outside the caching allocator"
    ),
    _ErrorPattern(
        r"CUDA driver error: out of memory", "c10/cuda/driver_api.h: expandable segments"
    ),
    _ErrorPattern(r"CUDNN_STATUS_ALLOC_FAILED", "cuDNN: cudnnStatus_t"),
    _ErrorPattern(r"(CUBLAS|CUSOLVER|HIPBLAS)_STATUS_ALLOC_FAILED", "cublasStatus_t and the like"),
    _ErrorPattern(r"CUFFT_ALLOC_FAILED", "cuFFT: cufftResult"),
    _ErrorPattern(r"Triton Error \[CUDA\]: out of memory", "Triton: CUDA_ERROR_OUT_OF_MEMORY"),
    _ErrorPattern(r"[Uu]nable to find a valid cuDNN algorithm", "ATen/native/cudnn/Conv_v7.cpp"),
    _ErrorPattern(r"unable to find an engine to execute", "ATen/native/cudnn/Conv_v8.cpp"),
    _ErrorPattern(
        r"NVML_SUCCESS == .* INTERNAL ASSERT FAILED", "huggingface/accelerate#3803, on MIG"
    ),
    _ErrorPattern(r"HIP out of memory", "c10/hip/HIPCachingAllocator.cpp, hipified"),
    _ErrorPattern(r"HIP error: out of memory|hipErrorOutOfMemory", "HIP: hipError_t"),
    _ErrorPattern(r"miopenStatusAllocFailed", "MIOpen: miopenStatus_t"),
    _ErrorPattern(r"MPS backend out of memory", "ATen/mps/MPSAllocator.mm"),
    _ErrorPattern(r"DefaultCPUAllocator: can't allocate memory", "c10/core/impl/alloc_cpu.cpp"),
    _ErrorPattern(r"DefaultCPUAllocator: not enough memory", "the same on Windows"),
    _ErrorPattern(r"std::bad_alloc", "the C++ standard library"),
    _ErrorPattern(
        r"could not create a (primitive(?! desc)|memory)",
        "oneDNN: dnnl::error of its constructors, when malloc fails",
        only_under_limit=True,
    ),
)

_LOADER_ERRORS = (
    _ErrorPattern(r"DataLoader worker .* is killed by signal: Killed", "the kernel's OOM killer"),
    _ErrorPattern(r"DataLoader worker .* is killed by signal: Bus error", "/dev/shm is full"),
    _ErrorPattern(
        r"unable to (mmap|write to file|allocate shared memory)", "torch/lib/libshm: /dev/shm"
    ),
    _ErrorPattern(
        r"Caught \w*MemoryError in DataLoader worker", "torch/_utils.py: ExceptionWrapper"
    ),
    _ErrorPattern(r"Insufficient memory", "OpenCV: cv::Error::StsNoMem"),
    _ErrorPattern(r"Cannot allocate memory", "errno ENOMEM, as when a worker is forked"),
)

_LOST_RANK = (
    _ErrorPattern(r"Connection (closed|reset) by peer", "gloo/transport/tcp/pair.cc, TCPStore"),
    _ErrorPattern(r"gloo.*(Broken pipe|Timed out|Connection refused)", "the same"),
    _ErrorPattern(r"ncclRemoteError|remote process exited", "NCCL: ncclResult_t"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that this process ran out of memory, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _matches(error, _DEVICE_ERRORS)


def is_loader_out_of_memory(error: BaseException) -> bool:
    """Whether an error from a data loader says that the host's memory ran out.

    Errors of worker processes carry the original's text.
    """
    return is_out_of_memory(error) or _matches(error, _LOADER_ERRORS)


def is_killed_worker(error: BaseException) -> bool:
    """Whether an error says that a loader's worker was killed, as the kernel does if RAM is full.

    PyTorch's handler of SIGCHLD raises it, whatever the process does at that moment.
    """
    return isinstance(error, RuntimeError) and _matches(error, _LOADER_ERRORS[:2])


def is_lost_rank(error: BaseException) -> bool:
    """Whether an error of a collective says that another rank is gone."""
    return isinstance(error, RuntimeError) and _matches(error, _LOST_RANK)


def error_line(error: BaseException) -> str:
    """The line of an error's message that says what ran out, without stacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    patterns = "|".join(known.pattern for known in (*_DEVICE_ERRORS, *_LOADER_ERRORS))
    telling = [line for line in lines if re.search(patterns, line)]
    return (telling or lines[-1:] or [type(error).__name__])[0]


def _matches(error: BaseException, patterns: tuple[_ErrorPattern, ...]) -> bool:
    text = str(error)
    return any(
        re.search(known.pattern, text) and (not known.only_under_limit or _process_is_limited())
        for known in patterns
    )


def _process_is_limited() -> bool:
    try:
        import resource
    except ImportError:  # Windows
        return False
    limits = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)
