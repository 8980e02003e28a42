# Copyright (c) the d2_memfit developers.
"""A trainer whose checkpoints hold all that a run needs to resume without a difference."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Optional

import torch
from detectron2.engine import HookBase, SimpleTrainer
from detectron2.utils import comm
from torch import nn

from ... import compat
from ...errors import ConfigError
from ...techniques import ShardedOptimizer
from .resumable_batches import ResumableBatches
from .run_state import RunState

__all__ = ["GatherStates", "Progress", "ResumableTrainer", "TrainingEnded"]


class TrainingEnded(BaseException):
    """Raised by a hook that ends a run as finished; Detectron2's loop logs an ``Exception``."""


@dataclass
class Progress:
    """How far an iteration is, for a checkpoint if the run ends in it."""

    iteration: int
    put_back: Callable[[], None] = lambda: None  # restores the state before the iteration
    is_stepping: bool = False  # the optimizer changes weights, and has not finished
    has_stepped: bool = False


class ResumableTrainer(SimpleTrainer):
    """A ``SimpleTrainer`` that trains the same, with a :class:`RunState` in its checkpoints.

    On several ranks, all must call :meth:`gather_states` before rank 0 saves. The hook
    :class:`GatherStates` does this.

    Attributes:
        needs_train: whether there are hooks of MEMFIT.MONITOR that no loop has called yet.
        progress: how far the iteration ``iter`` is.
    """

    def __init__(
        self, model: nn.Module, data_loader: Iterable[Any], optimizer: torch.optim.Optimizer
    ) -> None:
        self.run_state = RunState(compat.without_ddp(model), data_loader)
        super().__init__(model, self.run_state.batches, optimizer)
        self.needs_train = False
        self.stop_signal = 0
        self.agreed_stop_signal: Optional[int] = None  # before a step
        self.progress: Optional[Progress] = None
        self.data_loader = data_loader
        compat.keep_iterator(self, self.run_state.batches)

    def reset_data_loader(self, data_loader_builder: Callable[[], Iterable[Any]]) -> None:
        """Train with another loader from now on, as in Detectron2 main."""
        del self.data_loader
        data_loader = data_loader_builder()
        self.run_state = RunState(compat.without_ddp(self.model), data_loader)
        self.data_loader = data_loader
        compat.iterate_anew(self, self.run_state.batches)

    @property
    def loads_in_this_process(self) -> bool:
        """Whether images are known to be loaded here, with this process's random numbers."""
        batches = self.run_state.batches
        return isinstance(batches, ResumableBatches) and batches.num_workers == 0

    def check_train(self) -> None:
        """Raise :class:`ConfigError` if this is a loop that calls no hooks, and should."""
        if self.needs_train:
            raise ConfigError(
                "MEMFIT.MONITOR is on, and a loop of run_step() calls no hooks: train with "
                "trainer.train(start_iter, max_iter), or leave MEMFIT.MONITOR at its defaults"
            )

    def train(self, start_iter: int, max_iter: int) -> None:
        with suppress(TrainingEnded):
            super().train(start_iter, max_iter)

    def before_train(self) -> None:
        self.needs_train = False
        super().before_train()
        self.run_state.restore_again(self.start_iter)

    def gather_states(self) -> None:
        """Collect on rank 0 the states of all ranks for a checkpoint. All ranks must call it."""
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.consolidate_state_dict()
        self.run_state.gather(self.iter)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "run": self.run_state.state_dict(self.iter)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.run_state.load_state_dict(state_dict.get("run"))


class GatherStates(HookBase):
    """Calls the trainer's ``gather_states`` just before a hook of any rank saves a checkpoint.

    Rank 0 alone writes checkpoints, and they hold the states of all ranks. Register it on all
    ranks, before the hooks that save.
    """

    def __init__(self) -> None:
        self._periods: set[int] = set()

    def before_train(self) -> None:
        self._periods = set().union(*comm.all_gather(compat.saving_periods(self.trainer)))

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if done >= self.trainer.max_iter or any(done % period == 0 for period in self._periods):
            self.trainer.gather_states()
