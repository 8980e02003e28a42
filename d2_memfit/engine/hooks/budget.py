# Copyright (c) the d2_memfit developers.
"""A hook that keeps the budget while memory outside PyTorch's allocator grows."""

from typing import Any

from ...memory import enforce_budget
from .after_forwards import AfterForwards

__all__ = ["EnforceBudget"]

_FIRST_ITERATIONS = 10  # these load kernels, cuBLAS handles and NCCL buffers
_PERIOD = 100


class EnforceBudget(AfterForwards):
    """Lowers the limit of PyTorch's allocator as memory outside it grows, on a GPU.

    The limit set at the start cannot include what is loaded at first use. This memory is measured
    after each forward and step of the first 10 iterations, then every 100 iterations.

    Args:
        budget_gb, device: as for :func:`~d2_memfit.memory.enforce_budget`.
    """

    def __init__(self, budget_gb: float, device: str) -> None:
        self._budget_gb = budget_gb
        self._device_name = device

    def after_step(self) -> None:
        done = self.trainer.iter + 1 - self.trainer.start_iter
        if done <= _FIRST_ITERATIONS or done % _PERIOD == 0:
            self._limit()
        if done == _FIRST_ITERATIONS:
            self.after_train()

    def after_forward(self, *_: Any) -> None:
        self._limit()

    def _limit(self) -> None:
        if self._device_name.startswith("cuda"):
            enforce_budget(self._budget_gb, self._device_name)
