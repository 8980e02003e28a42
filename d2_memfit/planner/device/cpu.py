# Copyright (c) the d2_memfit developers.
"""What is measured on the CPU at hand."""

import functools
import time

import torch

__all__ = ["slowdown_of_16_bits"]

_SIDE = 256  # of matrices: bfloat16 takes 40 ms of a CPU that has no instructions for it
_TRIES = 3


@functools.cache
def slowdown_of_16_bits() -> float:
    """Time of a matrix product in bfloat16 over that in float32, on this CPU.

    Under 1 with AMX, about 100 if PyTorch has no kernels for the CPU's instructions.
    """
    seconds = []
    for dtype in (torch.bfloat16, torch.float32):
        matrix = torch.ones(_SIDE, _SIDE, dtype=dtype)
        tries = []
        for _ in range(_TRIES):
            start = time.thread_time()
            matrix @ matrix
            tries.append(time.thread_time() - start)
        seconds.append(min(tries))
    return seconds[0] / max(seconds[1], 1e-9)
