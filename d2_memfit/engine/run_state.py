# Copyright (c) the d2_memfit developers.
"""A trainer whose checkpoints contain everything that a run needs to resume exactly."""

import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Optional

import torch
from detectron2.engine import HookBase, SimpleTrainer
from detectron2.utils import comm

from ..common import compat
from ..common.side_work import RandomState
from .batches import ResumableBatches, UnknownLoader
from .ending import saved_at_end, saved_if_failing

logger = logging.getLogger(__name__)


class ResumableTrainer(SimpleTrainer):
    """A ``SimpleTrainer`` that trains the same, and whose checkpoints contain the run.

    That is the order of the data, random states of each rank and of its loader's workers, and the
    plain numbers that forwards changed in the model, such as RetinaNet's running normaliser. On
    several ranks, all must call :meth:`gather_states` before rank 0 saves. The hook
    :class:`GatherStates` does this.

    Attributes:
        run: a :class:`~.build.Run`, which begins with ``train``; None if no job made it.
        resumable_batches: what it trains on; None if the order of its loader cannot be resumed.
        undo, done, stop_signal, agreed_stop_signal: see :class:`~.ending.SaveOnEnding`.
    """

    run: Any = None
    stop_signal = 0
    agreed_stop_signal: Optional[int] = None  # before a step
    resumable_batches: Optional[ResumableBatches] = None
    _loaded_state: Optional[RandomState] = None  # of this rank, until the run starts

    def __init__(
        self, model: torch.nn.Module, data_loader: Iterable[Any], optimizer: torch.optim.Optimizer
    ) -> None:
        with suppress(UnknownLoader):
            self.resumable_batches = ResumableBatches(data_loader)
        super().__init__(model, self.resumable_batches or data_loader, optimizer)
        self._numbers_at_start = self._numbers()
        # By an iteration, the last one that is known, the states of all ranks after it.
        self._gathered: dict[int, list[Any]] = {}
        self.data_loader = data_loader
        compat.keep_iterator(self, self.resumable_batches or data_loader)

    def train(self, start_iter: int, max_iter: int) -> None:
        with saved_at_end(self):
            super().train(start_iter, max_iter)

    def before_train(self) -> None:
        if self.run is not None:
            self.run.start(self)
        super().before_train()
        self.restore_again()

    def after_train(self) -> None:
        if self.run is None or self.run.has_started:  # otherwise no hook has
            with saved_if_failing(self):
                super().after_train()

    def gather_states(self) -> None:
        """Collect on rank 0 the states of all ranks for a checkpoint. All ranks must call it."""
        if hasattr(self.optimizer, "consolidate_state_dict"):  # it is sharded
            self.optimizer.consolidate_state_dict()
        self._gathered = {self.iter: comm.gather(self._own_state())}

    def _own_state(self) -> dict[str, Any]:
        """The state of this rank, in plain types and tensors."""
        return {
            "random_states": RandomState(next(self.model.parameters()).device).states,
            "numbers": dict(self._numbers().items() - self._numbers_at_start.items()),
            "data": self.resumable_batches and self.resumable_batches.state(),
        }

    def _numbers(self) -> dict[str, Any]:
        """The plain numbers among the attributes of all modules, by their full names."""
        modules = compat.without_ddp(self.model).named_modules()
        values = ((f"{name}.{key}", v) for name, m in modules for key, v in vars(m).items())
        return {name: value for name, value in values if type(value) in (int, float)}

    def state_dict(self) -> dict[str, Any]:
        # After training, when hooks may save, iter is one more.
        iteration = min(self.iter, getattr(self, "max_iter", self.iter + 1) - 1)
        ranks = [*self._gathered.get(iteration, [])] or [None] * comm.get_world_size()
        ranks[comm.get_rank()] = self._own_state()
        run = {"ranks": ranks, "data": self.resumable_batches and self.resumable_batches.stream()}
        return {**super().state_dict(), "iteration": iteration, "run_state": run}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.load_run(state_dict.get("run_state"))  # version 0.2 had another, "run"

    def load_run(self, run: Optional[dict[str, Any]]) -> None:
        """Continue from the run in a checkpoint; None if it has none."""
        ranks = run["ranks"] if run else []
        own, batches = dict(enumerate(ranks)).get(comm.get_rank()), self.resumable_batches
        if own is not None:
            for name, value in own["numbers"].items():
                module, _, attribute = name.rpartition(".")
                setattr(compat.without_ddp(self.model).get_submodule(module), attribute, value)
            device = next(self.model.parameters()).device
            self._loaded_state = RandomState(device, own["random_states"])
            self._loaded_state.restore()
        elif run:
            text = "The checkpoint has no random states of rank %d: it draws other augmentations"
            logger.warning(text, comm.get_rank())
        try:
            if batches is None or not run or run["data"] is None:
                raise ValueError("it needs build_detection_train_loader, and d2_memfit since 0.3")
            batches.load_state_dict(run["data"], [rank and rank["data"] for rank in ranks])
        except ValueError as e:
            logger.warning("The order of the data starts from the beginning: %s", e)

    def restore_again(self) -> None:
        """Restore random states, because code since the load may have drawn random numbers."""
        if self._loaded_state is not None:
            self._loaded_state.restore()
        self._loaded_state = None


class GatherStates(HookBase):
    """Calls the trainer's ``gather_states`` just before a hook of any rank saves or evaluates.

    Only rank 0 writes checkpoints, and they contain the states of all ranks. A run may end in an
    evaluation. Register this hook on all ranks, before the hooks that save.
    """

    def before_train(self) -> None:
        periods = comm.all_gather(compat.periods_of_states(self.trainer))
        self._periods = {self.trainer.max_iter}.union(*periods)

    def after_step(self) -> None:
        if any((self.trainer.iter + 1) % period == 0 for period in self._periods):
            self.trainer.gather_states()
