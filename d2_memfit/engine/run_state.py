# Copyright (c) the d2_memfit developers.
"""A trainer whose checkpoints contain everything that a run needs to resume exactly."""

import logging
from collections.abc import Callable, Iterable
from typing import Any, Optional

import torch
from detectron2.engine import SimpleTrainer, TrainerBase
from detectron2.utils import comm
from torch import nn

from .. import compat
from ..common.random_state import RandomState
from ..techniques import ShardedOptimizer
from .batches import ResumableBatches, UnknownLoader
from .ending import call_after_train, saved_at_end

__all__ = ["ResumableTrainer", "last_iteration"]

logger = logging.getLogger(__name__)

_NO_DATA = "The data start from the beginning: %s"


class ResumableTrainer(SimpleTrainer):
    """A ``SimpleTrainer`` that trains the same, with a :class:`RunState` in its checkpoints.

    On several ranks, all must call :meth:`gather_states` before rank 0 saves. The hook
    ``GatherStates`` does this.

    Attributes:
        run: a :class:`~d2_memfit.engine.build.Run`, which begins with ``train``, or with the first
            step of a loop without it. None for a trainer that no job has made.
        undo, done, stop_signal, agreed_stop_signal: see :class:`~d2_memfit.engine.SaveOnEnding`.
    """

    _has_started = False

    def __init__(
        self, model: nn.Module, data_loader: Iterable[Any], optimizer: torch.optim.Optimizer
    ) -> None:
        self.run_state = RunState(compat.without_ddp(model), data_loader)
        super().__init__(model, self.run_state.batches, optimizer)
        self.run: Any = None
        self.stop_signal = 0
        self.agreed_stop_signal: Optional[int] = None  # before a step
        self.undo: Optional[Callable[[], None]] = None
        self.done = -1
        self.data_loader = data_loader
        compat.keep_iterator(self, self.run_state.batches)

    def reset_data_loader(self, data_loader_builder: Callable[[], Iterable[Any]]) -> None:
        """Train with another loader from now on, as in Detectron2 main."""
        del self.data_loader
        self.data_loader = data_loader_builder()
        self.run_state = RunState(compat.without_ddp(self.model), self.data_loader)
        compat.replace_iterator(self, self.run_state.batches)

    def check_train(self) -> None:
        """Check the run if this is a loop that calls no hooks."""
        if self.run is not None and not self._has_started:
            self.run.check_loop()
            self._has_started = True

    def train(self, start_iter: int, max_iter: int) -> None:
        with saved_at_end(self):
            super().train(start_iter, max_iter)

    def before_train(self) -> None:
        self._has_started = False
        if self.run is not None:
            self.run.start(self)
        super().before_train()
        self.run_state.restore_again(self.start_iter)
        self._has_started = True

    def after_train(self) -> None:
        if self._has_started:  # otherwise some hooks have not
            call_after_train(self, super().after_train)

    def gather_states(self) -> None:
        """Collect on rank 0 the states of all ranks for a checkpoint. All ranks must call it."""
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.consolidate_state_dict()
        self.run_state.gathered = self.iter, comm.gather(self.run_state.own(self.learned()))

    def learned(self) -> Any:
        """State that only this rank has learned in training, in plain types."""
        return None

    def state_dict(self) -> dict[str, Any]:
        iteration = last_iteration(self)
        run = self.run_state.state_dict(iteration, self.learned())
        return {**super().state_dict(), "iteration": iteration, "run": run}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.run_state.load_state_dict(state_dict.get("run"))


def last_iteration(trainer: TrainerBase) -> int:
    """The last iteration. After training, when hooks may save, ``trainer.iter`` is one more."""
    return min(trainer.iter, getattr(trainer, "max_iter", trainer.iter + 1) - 1)


class RunState:
    """The order of the data, the random states and the plain numbers of a run.

    Random states are those of a rank and of its loader's workers. The plain numbers are those that
    forwards changed in the model, such as RetinaNet's running normaliser.

    Args:
        model: without DDP around it.
        data_loader: the trainer's loader.

    Attributes:
        batches: iterate these in place of the loader. It is the loader itself if its order cannot
            be resumed.
        gathered: an iteration, and the states of all ranks after it, on rank 0.
    """

    def __init__(self, model: nn.Module, data_loader: Iterable[Any]) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._numbers_at_start = self._numbers()
        self.batches: Iterable[Any] = data_loader
        self._data: Optional[ResumableBatches] = None
        try:
            self.batches = self._data = ResumableBatches(data_loader)
        except UnknownLoader as e:
            self._unknown = f"{e}"
        self._random_state: Optional[RandomState] = None  # of this rank, until the run starts
        self._is_loaded = False
        self.gathered: tuple[int, list[Any]] = (-1, [])

    @property
    def loads_in_this_process(self) -> bool:
        """Whether images are known to be loaded here, with this process's random numbers."""
        return self._data is not None and self._data.layout["workers"] == 0

    def has_killed_worker(self) -> bool:
        """Whether a worker of the loader was ended with SIGKILL."""
        return self._data is not None and self._data.has_killed_worker()

    def undo_point(self) -> Callable[[], None]:
        """A function that puts the position in the data back."""
        return (lambda: None) if self._data is None else self._data.undo_point()

    def own(self, learned: Any) -> dict[str, Any]:
        """The state of this rank, in plain types and tensors, with what this rank has learned."""
        return {
            "random_states": RandomState(self._device).state_dict(),
            "numbers": dict(self._numbers().items() - self._numbers_at_start.items()),
            "data": self._data and self._data.state(),
            **({} if learned is None else {"learned": learned}),
        }

    def state_dict(self, iteration: int, learned: Any = None) -> dict[str, Any]:
        """The state in plain types and tensors. Ranks whose state is not known have None."""
        gathered_at, ranks = self.gathered
        ranks = (
            list(ranks) if gathered_at == iteration and ranks else [None] * comm.get_world_size()
        )
        ranks[comm.get_rank()] = self.own(learned)
        return {"ranks": ranks, "data": self._data and self._data.stream()}

    def _numbers(self) -> dict[str, Any]:
        """The plain numbers among the attributes of all modules, by their full names."""
        return {
            f"{name}.{key}": float(value) if isinstance(value, float) else int(value)
            for name, module in self._model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }

    def load_state_dict(self, state: Optional[dict[str, Any]]) -> None:
        """Continue from a checkpoint's state; None if it has none."""
        self._is_loaded, self._random_state = True, None
        if state is None:
            why = (
                "the checkpoint has neither their order nor random states. Checkpoints of plain "
                "Detectron2 have none. A checkpointer of your own saves them after "
                'checkpointer.add_checkpointable("trainer", trainer)'
            )
            logger.warning(_NO_DATA, why)
            return
        ranks, rank = state["ranks"], comm.get_rank()
        own = ranks[rank] if rank < len(ranks) else None
        if own is not None:
            modules = dict(self._model.named_modules())
            for name, value in own["numbers"].items():
                module, _, attribute = name.rpartition(".")
                if module in modules:
                    setattr(modules[module], attribute, value)
            self._random_state = RandomState.from_state_dict(own["random_states"], self._device)
            self._random_state.restore()
        elif rank < len(ranks):
            logger.warning("The checkpoint has no random states of rank %d, which had ended", rank)
        if self._data is None:
            text = "only a loader of build_detection_train_loader can be resumed, and this is "
            logger.warning(_NO_DATA, text + self._unknown)
        elif state["data"] is None:
            logger.warning(_NO_DATA, "the run of the checkpoint had another loader")
        else:
            try:
                is_same = self._data.load_state_dict(
                    state["data"], [r and r["data"] for r in ranks]
                )
            except ValueError as e:
                logger.warning(_NO_DATA, f"dataset or sampler have changed: {e}")
                return
            text = "" if is_same else ", but for up to a batch of each worker: the layout is new"
            logger.info("The data continue where they were%s", text)

    def restore_again(self, start_iter: int) -> None:
        """Restore again, because code since the load may have drawn random numbers."""
        if start_iter > 0 and not self._is_loaded:
            self.load_state_dict(None)
        if self._random_state is not None:
            self._random_state.restore()
        self._random_state = None
