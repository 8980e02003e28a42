# Copyright (c) the d2_memfit developers.
"""The state that a resumed run needs in addition to model, optimizer and iteration."""

import logging
import pickle
from collections.abc import Callable, Iterable
from typing import Any, Optional

from detectron2.utils import comm
from torch import nn

from ...common.random_state import RandomState
from ...memory import with_room
from ..state import Snapshot
from .resumable_batches import ResumableBatches, UnknownLoader

__all__ = ["RunState"]

logger = logging.getLogger(__name__)


class RunState:
    """The order of the data, the random states and the plain numbers of a run.

    Random states are those of all ranks and of their loaders' workers. The plain numbers are those
    that forwards changed in the model, such as RetinaNet's running normaliser.

    Args:
        model: without DDP around it.
        data_loader: the trainer's loader.

    Attributes:
        batches: what to iterate in place of the loader. It is the loader itself if its order cannot
            be resumed.
    """

    def __init__(self, model: nn.Module, data_loader: Iterable[Any]) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._numbers_at_start = _numbers(model)
        self._why_unknown = ""
        self._data: Optional[ResumableBatches] = None
        try:
            self._data = ResumableBatches(data_loader)
        except UnknownLoader as e:
            self._why_unknown = str(e)
        self.batches: Iterable[Any] = data_loader if self._data is None else self._data
        self._gathered: tuple[int, list[bytes]] = (-1, [])
        self._loaded: Optional[dict[str, Any]] = None  # of this rank
        self._is_known = False

    def gather(self, iteration: int) -> None:
        """Collect the states of all ranks on rank 0. All ranks call it before rank 0 saves."""
        self.keep(iteration, comm.gather(self.packed()))

    def has_killed_worker(self) -> bool:
        """Whether a worker of the loader was ended with SIGKILL."""
        return self._data is not None and self._data.has_killed_worker()

    def keep(self, iteration: int, ranks: list[bytes]) -> None:
        """Keep the :meth:`packed` states of all ranks after an iteration."""
        self._gathered = (iteration, ranks)

    def mark(self, is_watched: bool) -> Callable[[], None]:
        """A function that puts back what an iteration changes before its optimizer step.

        Args:
            is_watched: whether forwards are watched for changes of parameters.
        """
        snapshot = with_room(lambda: Snapshot(self._model, is_watched=is_watched), self._device)
        undo = [snapshot.restore]
        if self._data is not None:
            undo.append(self._data.mark())

        def put_back() -> None:
            for function in undo:
                function()

        return put_back

    def state_dict(self, iteration: int) -> dict[str, Any]:
        """The state in plain types and tensors.

        States of other ranks come from :meth:`gather`; they are None if that was in another
        iteration.
        """
        gathered_at, packed = self._gathered
        ranks: list[Any] = [None] * comm.get_world_size()
        if gathered_at == iteration and packed:
            ranks = [_unpacked(state) if state else None for state in packed]
        ranks[comm.get_rank()] = _unpacked(self.packed())
        return {"ranks": ranks, "data": self._data and self._data.stream()}

    def packed(self) -> bytes:
        """The state of this rank, quick to make and to send."""
        numbers = _numbers(self._model).items() - self._numbers_at_start.items()
        data = self._data and self._data.packed()
        return pickle.dumps((RandomState(self._device).state_dict(), dict(numbers), data))

    def load_state_dict(self, state: Optional[dict[str, Any]]) -> None:
        """Continue from a checkpoint's state; None if it has none."""
        self._is_known = True
        if state is None:
            logger.warning(
                "The data begin again, because the checkpoint has neither their order nor random "
                "states. Those of plain Detectron2 have none. A checkpointer of your own saves "
                'them after checkpointer.add_checkpointable("trainer", trainer)'
            )
            return
        ranks = state["ranks"]
        rank = comm.get_rank()
        self._loaded = ranks[rank] if rank < len(ranks) else None
        if self._loaded is not None:
            self._set_numbers(self._loaded["numbers"])
            self._set_random_state(self._loaded["random_states"])
        elif rank < len(ranks):
            logger.warning(
                "The checkpoint has no random states of rank %d, because it was saved without "
                "trainer.gather_states()",
                rank,
            )
        self._load_data(state["data"], [r and r["data"] for r in ranks])

    def restore_again(self, start_iter: int) -> None:
        """Restore again, because code since the load may have drawn random numbers."""
        if start_iter > 0 and not self._is_known:
            self.load_state_dict(None)
        if self._loaded is not None:
            self._set_random_state(self._loaded["random_states"])
        self._loaded = None

    def _load_data(self, stream: Optional[dict[str, Any]], ranks: list[Any]) -> None:
        if self._data is None:
            logger.warning(
                "The data begin again: only a loader of build_detection_train_loader can be "
                "resumed, and the training loader is %s",
                self._why_unknown,
            )
            return
        if stream is None:
            logger.warning("The data begin again: the run of the checkpoint had another loader")
            return
        known = next(state for state in ranks if state)
        unknown = {"workers": [None] * len(known["workers"]), "seeds": None, "waiting": []}
        try:
            is_same = self._data.load_state_dict(
                stream, [state or {**known, **unknown} for state in ranks]
            )
        except ValueError as e:
            logger.warning("The data begin again, because dataset or sampler have changed: %s", e)
            return
        changed = (
            ". The number of ranks, workers or images has changed, so the remaining images are "
            "distributed again, with other random augmentations"
        )
        logger.info("The data go on where they were%s", "" if is_same else changed)

    def _set_random_state(self, states: dict[str, Any]) -> None:
        RandomState.from_state_dict(states, self._device).restore()

    def _set_numbers(self, numbers: dict[str, Any]) -> None:
        modules = dict(self._model.named_modules())
        for name, value in numbers.items():
            module, _, attribute = name.rpartition(".")
            if module in modules:
                setattr(modules[module], attribute, value)


def _unpacked(state: bytes) -> dict[str, Any]:
    states, numbers, data = pickle.loads(state)
    return {
        "random_states": states,
        "numbers": numbers,
        "data": data and ResumableBatches.unpacked(data),
    }


def _numbers(model: nn.Module) -> dict[str, Any]:
    """The plain numbers among the attributes of all modules, by their full names."""
    return {
        f"{name}.{key}": float(value) if isinstance(value, float) else int(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
