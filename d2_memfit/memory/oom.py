"""Telling an out-of-memory error from every other error."""

import re
from dataclasses import dataclass

import torch

__all__ = ["error_line", "is_loader_out_of_memory", "is_out_of_memory"]


@dataclass(frozen=True)
class _Sign:
    """A text that stands for an out-of-memory error, and where it comes from."""

    pattern: str
    source: str
    only_under_limit: bool = False  # without a limit on the process, it has other causes too


# RuntimeErrors, by their texts. torch.OutOfMemoryError and MemoryError are known by their types.
_SIGNS = (
    _Sign(r"CUDA out of memory", "c10/cuda/CUDACachingAllocator.cpp, before PyTorch 1.13 no class"),
    _Sign(r"CUDA error: out of memory", "cudaErrorMemoryAllocation, outside the caching allocator"),
    _Sign(r"CUDA driver error: out of memory", "c10/cuda/driver_api.h: expandable segments"),
    _Sign(r"CUDNN_STATUS_ALLOC_FAILED", "cuDNN: cudnnStatus_t"),
    _Sign(r"(CUBLAS|CUSOLVER|HIPBLAS)_STATUS_ALLOC_FAILED", "cublasStatus_t and the like"),
    _Sign(r"CUFFT_ALLOC_FAILED", "cuFFT: cufftResult"),
    _Sign(r"Triton Error \[CUDA\]: out of memory", "Triton: CUDA_ERROR_OUT_OF_MEMORY"),
    _Sign(r"[Uu]nable to find a valid cuDNN algorithm", "ATen/native/cudnn/Conv_v7.cpp"),
    _Sign(r"unable to find an engine to execute", "ATen/native/cudnn/Conv_v8.cpp"),
    _Sign(r"NVML_SUCCESS == .* INTERNAL ASSERT FAILED", "huggingface/accelerate#3803, on MIG"),
    _Sign(r"HIP out of memory", "c10/hip/HIPCachingAllocator.cpp, hipified"),
    _Sign(r"HIP error: out of memory|hipErrorOutOfMemory", "HIP: hipError_t"),
    _Sign(r"miopenStatusAllocFailed", "MIOpen: miopenStatus_t"),
    _Sign(r"MPS backend out of memory", "ATen/mps/MPSAllocator.mm"),
    _Sign(r"DefaultCPUAllocator: can't allocate memory", "c10/core/impl/alloc_cpu.cpp"),
    _Sign(r"DefaultCPUAllocator: not enough memory", "the same on Windows"),
    _Sign(r"std::bad_alloc", "the C++ standard library"),
    _Sign(
        r"could not create a (primitive(?! desc)|memory)",
        "oneDNN: dnnl::error of its constructors, when malloc fails",
        only_under_limit=True,
    ),
)

_LOADER_SIGNS = (
    _Sign(r"DataLoader worker .* is killed by signal: Killed", "the kernel's OOM killer"),
    _Sign(r"DataLoader worker .* is killed by signal: Bus error", "/dev/shm is full"),
    _Sign(r"unable to (mmap|write to file|allocate shared memory)", "torch/lib/libshm: /dev/shm"),
    _Sign(r"Caught \w*MemoryError in DataLoader worker", "torch/_utils.py: ExceptionWrapper"),
    _Sign(r"Insufficient memory", "OpenCV: cv::Error::StsNoMem"),
    _Sign(r"Cannot allocate memory", "errno ENOMEM, as when a worker is forked"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out in this process, on a device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _has_sign(error, _SIGNS)


def is_loader_out_of_memory(error: BaseException) -> bool:
    """Whether an error that came out of a data loader says that the host's memory ran out.

    Errors of worker processes come with the text of the original.
    """
    return is_out_of_memory(error) or _has_sign(error, _LOADER_SIGNS)


def error_line(error: BaseException) -> str:
    """The line of an error's text that says what ran out, without stacks around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    patterns = "|".join(sign.pattern for sign in (*_SIGNS, *_LOADER_SIGNS))
    telling = [line for line in lines if re.search(patterns, line)]
    return (telling or lines[-1:] or [type(error).__name__])[0]


def _has_sign(error: BaseException, signs: tuple[_Sign, ...]) -> bool:
    text = str(error)
    return any(
        re.search(sign.pattern, text) and (not sign.only_under_limit or _process_is_limited())
        for sign in signs
    )


def _process_is_limited() -> bool:
    try:
        import resource
    except ImportError:  # Windows
        return False
    limits = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)
