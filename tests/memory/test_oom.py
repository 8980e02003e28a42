# Copyright (c) the d2_memfit developers.
import pytest
import torch

from d2_memfit.memory import error_line, is_loader_out_of_memory, is_out_of_memory

# Texts as users have reported them.
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    MemoryError(),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 7.79 GiB total capacity"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
    RuntimeError("Unable to find a valid cuDNN algorithm to run convolution"),
    RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:838"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("HIP out of memory. Tried to allocate 1.17 GiB."),
    RuntimeError("MPS backend out of memory (MPS allocated: 17.06 GB)."),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 29491200 bytes. Error code 12 (Cannot allocate memory)"
    ),
]
OTHERS = [
    RuntimeError("The size of tensor a (4) must match the size of tensor b (3)"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    RuntimeError("could not create a primitive descriptor for a convolution"),
    RuntimeError("could not create a primitive"),  # where no limit is in force
    AssertionError("out of memory"),
    FloatingPointError("Loss became infinite or NaN at iteration=1!"),
    ValueError("CUDA out of memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=repr)
def test_out_of_memory_is_known(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_nothing_else_is_taken_for_it(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    "text",
    [
        "DataLoader worker (pid 123) is killed by signal: Killed.",
        "DataLoader worker (pid 123) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory.",
        "Caught RuntimeError in DataLoader worker process 0.\nTraceback ...\n"
        "RuntimeError: DefaultCPUAllocator: can't allocate memory",
        "OpenCV(4.8.1) alloc.cpp:73: error: (-4:Insufficient memory) Failed to allocate 99 bytes",
    ],
)
def test_a_loader_that_ran_out_of_memory_is_known(text):
    assert is_loader_out_of_memory(RuntimeError(text))


def test_the_telling_line_of_an_error():
    error = RuntimeError("Caught X\nstack\nCUDA out of memory. Tried 2 MiB\nframe #0: c10::Error")
    assert error_line(error) == "CUDA out of memory. Tried 2 MiB"
    assert error_line(MemoryError()) == "MemoryError"
