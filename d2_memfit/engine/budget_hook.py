"""Keeping a budget when the process takes more of a GPU than it did at first."""

from detectron2.engine import HookBase

from ..memory import enforce_budget

__all__ = ["EnforceBudget"]


class EnforceBudget(HookBase):
    """Limits the allocator anew after the first iteration.

    By then kernels and NCCL's buffers are on the GPU, which are loaded when they are first used,
    and which the limit at the start could not know.

    Args:
        budget_gb, device: as for :func:`~d2_memfit.memory.enforce_budget`.
    """

    def __init__(self, budget_gb: float, device: str) -> None:
        self._budget_gb = budget_gb
        self._device = device

    def after_step(self) -> None:
        if self.trainer.iter == self.trainer.start_iter and self._device.startswith("cuda"):
            enforce_budget(self._budget_gb, self._device)
