# Copyright (c) the d2_memfit developers.
"""A hook that collects the states of all ranks, because only rank 0 writes checkpoints."""

from detectron2.engine import HookBase
from detectron2.utils import comm

from .. import compat

__all__ = ["GatherStates"]


class GatherStates(HookBase):
    """Calls the trainer's ``gather_states`` just before a hook of any rank saves a checkpoint.

    Register it on all ranks, before the hooks that save.
    """

    def __init__(self) -> None:
        self._periods: set[int] = set()

    def before_train(self) -> None:
        self._periods = set().union(*comm.all_gather(compat.saving_periods(self.trainer)))

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if done >= self.trainer.max_iter or any(done % period == 0 for period in self._periods):
            self.trainer.gather_states()
