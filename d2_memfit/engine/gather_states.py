# Copyright (c) the d2_memfit developers.
"""A hook that collects the states of all ranks, because only rank 0 writes checkpoints."""

from detectron2.engine import HookBase

__all__ = ["GatherStates"]


class GatherStates(HookBase):
    """Calls the trainer's ``gather_states`` just before a checkpoint may be saved.

    Register it on all ranks, before hooks that save. On one rank it is not needed.

    Args:
        periods: periods, in iterations, of the hooks that may save.
    """

    def __init__(self, *periods: int) -> None:
        self._periods = [period for period in periods if period > 0]

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if done >= self.trainer.max_iter or any(done % period == 0 for period in self._periods):
            self.trainer.gather_states()
