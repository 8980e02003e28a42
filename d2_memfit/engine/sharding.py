# Copyright (c) the d2_memfit developers.
"""A hook that saves an optimizer sharded over the ranks."""

from detectron2.engine import HookBase

from ..techniques import ShardedOptimizer

__all__ = ["ConsolidateOptimizer"]


class ConsolidateOptimizer(HookBase):
    """Gathers the states of a sharded optimizer on rank 0, just before they may be saved.

    Register it on all ranks, before hooks that save checkpoints.

    Args:
        optimizer: the trainer's.
        periods: periods, in iterations, of the hooks that may save.
    """

    def __init__(self, optimizer: ShardedOptimizer, *periods: int) -> None:
        self._optimizer = optimizer
        self._periods = [period for period in periods if period > 0]

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if done >= self.trainer.max_iter or any(done % period == 0 for period in self._periods):
            self._optimizer.consolidate_state_dict()
