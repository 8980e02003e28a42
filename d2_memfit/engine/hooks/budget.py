# Copyright (c) the d2_memfit developers.
"""A hook that keeps the budget while memory outside PyTorch's allocator grows."""

from typing import Any

from detectron2.engine import HookBase

from ...memory import enforce_budget

__all__ = ["EnforceBudget"]

_FIRST_ITERATIONS = 10  # these load kernels, cuBLAS handles and NCCL buffers
_PERIOD = 100


class EnforceBudget(HookBase):
    """Lowers the limit of PyTorch's allocator as memory outside it grows, on a GPU.

    The limit set at the start cannot include what is loaded at first use. This memory is measured
    after each forward and step of the first 10 iterations, then every 100 iterations.

    Args:
        budget_gb, device: as for :func:`~d2_memfit.memory.enforce_budget`.
    """

    def __init__(self, budget_gb: float, device: str) -> None:
        self._budget_gb = budget_gb
        self._device = device
        self._forward_hook: Any = None

    def before_train(self) -> None:
        if self._device.startswith("cuda"):
            self._forward_hook = self.trainer.model.register_forward_hook(lambda *_: self._limit())

    def after_step(self) -> None:
        if not self._device.startswith("cuda"):
            return
        done = self.trainer.iter + 1 - self.trainer.start_iter
        if done <= _FIRST_ITERATIONS or done % _PERIOD == 0:
            self._limit()
        if done == _FIRST_ITERATIONS:
            self.after_train()

    def after_train(self) -> None:
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None

    def _limit(self) -> None:
        enforce_budget(self._budget_gb, self._device)
