# Copyright (c) the d2_memfit developers.
"""Out-of-memory errors: their detection, and release of what they leave behind."""

import ctypes
import gc
import re
import sys
from collections.abc import Iterable

import torch

__all__ = ["error_line", "is_killed_worker", "is_loader_out_of_memory", "is_lost_rank"]
__all__ += ["is_out_of_memory", "release_memory"]


# Texts of RuntimeErrors, as regular expressions, and their sources. torch.OutOfMemoryError and
# MemoryError are known by their types.
_DEVICE_ERRORS = {
    r"CUDA out of memory": "c10/cuda/CUDACachingAllocator.cpp, before PyTorch 1.13 no class",
    r"CUDA error: out of memory": "cudaErrorMemoryAllocation, outside the caching allocator",
    r"CUDA driver error: out of memory": "c10/cuda/driver_api.h: expandable segments",
    r"CUDNN_STATUS_(INTERNAL_ERROR_\w+_ALLOCATION|ALLOC)_FAILED": "cuDNN 8, 9: cudnnStatus_t",
    r"CUBLAS_STATUS_NOT_INITIALIZED when calling .cublasCreate": "no memory for its handle",
    r"Cuda failure \d* ?'out of memory'": "NCCL: ncclUnhandledCudaError",
    r"(CUBLAS|CUSOLVER|HIPBLAS)_STATUS_ALLOC_FAILED": "cublasStatus_t and the like",
    r"CUFFT_ALLOC_FAILED": "cuFFT: cufftResult",
    r"Triton Error \[CUDA\]: out of memory": "Triton: CUDA_ERROR_OUT_OF_MEMORY",
    r"[Uu]nable to find a valid cuDNN algorithm": "ATen/native/cudnn/Conv_v7.cpp",
    r"unable to find an engine to execute": "ATen/native/cudnn/Conv_v8.cpp",
    r"NVML_SUCCESS == .* INTERNAL ASSERT FAILED": "huggingface/accelerate#3803, on MIG",
    r"HIP out of memory": "c10/hip/HIPCachingAllocator.cpp, hipified",
    r"HIP error: out of memory|hipErrorOutOfMemory": "HIP: hipError_t",
    r"miopenStatusAllocFailed": "MIOpen: miopenStatus_t",
    r"MPS backend out of memory": "ATen/mps/MPSAllocator.mm",
    r"DefaultCPUAllocator: can't allocate memory": "c10/core/impl/alloc_cpu.cpp",
    r"DefaultCPUAllocator: not enough memory": "the same on Windows",
    r"std::bad_alloc": "the C++ standard library",
}
# oneDNN's constructors raise this dnnl::error when malloc fails. Without a limit on the process, it
# has other causes, too.
_ONEDNN_ERROR = {r"could not create a (primitive(?! desc)|memory)": "oneDNN: dnnl::error"}

_KILLED_WORKER = {
    r"DataLoader worker .* is killed by signal: Killed": "the kernel's OOM killer",
    r"DataLoader worker .* is killed by signal: Bus error": "/dev/shm is full",
}
_LOADER_ERRORS = {
    **_KILLED_WORKER,
    r"unable to (mmap|write to file|allocate shared memory)": "torch/lib/libshm: /dev/shm",
    r"Caught \w*MemoryError in DataLoader worker": "torch/_utils.py: ExceptionWrapper",
    r"Insufficient memory": "OpenCV: cv::Error::StsNoMem",
    r"Cannot allocate memory": "errno ENOMEM, as when a worker is forked",
}

_LOST_RANK = {
    r"Connection (closed|reset) by peer": "gloo/transport/tcp/pair.cc, TCPStore",
    r"gloo.*(Broken pipe|Timed out|Connection refused)": "the same",
    r"ncclRemoteError|remote process exited": "NCCL: ncclResult_t",
}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that this process ran out of memory, on a device or on the host."""
    if not isinstance(error, RuntimeError):  # torch.OutOfMemoryError is one
        return isinstance(error, MemoryError)
    is_known = isinstance(error, torch.OutOfMemoryError) or _matches(error, _DEVICE_ERRORS)
    return is_known or (_matches(error, _ONEDNN_ERROR) and _process_is_limited())


def is_loader_out_of_memory(error: BaseException) -> bool:
    """Whether an error from a data loader says that the host's memory ran out.

    Errors of worker processes carry the original's text.
    """
    return is_out_of_memory(error) or _matches(error, _LOADER_ERRORS)


def is_killed_worker(error: BaseException) -> bool:
    """Whether an error says that a loader's worker was killed, as the kernel does if RAM is full.

    PyTorch's handler of SIGCHLD raises it, whatever the process does at that moment.
    """
    return isinstance(error, RuntimeError) and _matches(error, _KILLED_WORKER)


def is_lost_rank(error: BaseException) -> bool:
    """Whether an error of a collective says that another rank is gone."""
    return isinstance(error, RuntimeError) and _matches(error, _LOST_RANK)


def error_line(error: BaseException) -> str:
    """The line of an error's message that says what ran out, without stacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    patterns = "|".join({**_DEVICE_ERRORS, **_ONEDNN_ERROR, **_LOADER_ERRORS})
    telling = [line for line in lines if re.search(patterns, line)]
    return (telling or lines[-1:] or [type(error).__name__])[0]


def _matches(error: BaseException, patterns: Iterable[str]) -> bool:
    return any(re.search(pattern, str(error)) for pattern in patterns)


def _process_is_limited() -> bool:
    if sys.platform == "win32":
        return False
    import resource

    limits = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)


def release_memory(device: torch.device) -> None:
    """Free unreferenced memory, on the device and on the host.

    Call it outside the ``except`` block: the traceback of a handled error keeps the tensors of its
    frames alive (pytorch/pytorch#18853).
    """
    gc.collect()  # of garbage in cycles, which Python may keep for hundreds of iterations
    # A backward that failed leaves tasks in the queue of its thread, with the graph and gradients
    # that belong to them. The next backward of the thread throws them away.
    torch.ones((), requires_grad=True).backward()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    if sys.platform == "linux":  # glibc keeps freed memory, which a limit counts
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
