# Copyright (c) the d2_memfit developers.
"""A hook that enforces a budget while memory outside the allocator grows."""

from typing import Any

from ...memory import enforce_budget
from .memory_hook import MemoryHook

__all__ = ["EnforceBudget"]

_PERIOD = 100  # iterations
_FIRST_ITERATIONS = 10  # these load kernels, cuBLAS handles and NCCL buffers


class EnforceBudget(MemoryHook):
    """Lowers the limit of a GPU's allocator as memory outside it grows.

    The limit set at the start cannot include kernels and buffers that are loaded at first use. This
    memory is measured after each forward and step of the first 10 iterations, then every 100.

    Args:
        budget_gb, device: as for :func:`~d2_memfit.memory.enforce_budget`.
    """

    def __init__(self, budget_gb: float, device: str) -> None:
        self._budget_gb = budget_gb
        self._device_name = device

    def after_step(self) -> None:
        done = self.trainer.iter + 1 - self.trainer.start_iter
        if done <= _FIRST_ITERATIONS or done % _PERIOD == 0:
            enforce_budget(self._budget_gb, self._device_name)
        if done == _FIRST_ITERATIONS:
            self._forward_hook.remove()  # later forwards load nothing new

    def after_forward(self, *_: Any) -> None:
        enforce_budget(self._budget_gb, self._device_name)
