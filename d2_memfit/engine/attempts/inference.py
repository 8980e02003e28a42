# Copyright (c) the d2_memfit developers.
"""Evaluation that continues with the same results after a batch did not fit."""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Optional

from torch import nn

from ... import compat
from ...common.patching import change_class
from ...settings import RecoveryOptions
from ...techniques import can_have_results_on_host, results_on_host
from ..state import StateCopy
from .attempts import Retries, run_all
from .oom_log import RAISE, OomEvent, OomLog

__all__ = ["recovering_inference"]


@contextmanager
def recovering_inference(model: nn.Module, options: Optional[RecoveryOptions]) -> Iterator[None]:
    """While open, run a batch that does not fit again with less memory.

    The first retry post-processes results on the host, the next runs one image at a time. Later
    batches keep what worked.

    Args:
        options: None changes nothing.

    Raises:
        OutOfMemoryError: one image alone does not fit. It also replaces the original error if
            memory runs out elsewhere, as in an evaluator.
    """
    if options is None:
        yield
        return
    bare = compat.without_ddp(model)
    retries = _BatchRetries(bare, OomLog(options, bare))
    original = type(model)

    def call(model: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        def run(piece: tuple[Any]) -> None:
            results.append(original.__call__(model, *piece, *args, **kwargs))

        results: list[Any] = []
        retries.put(batch)
        run_all(retries.take, run, retries)
        return results[0] if len(results) == 1 else [r for part in results for r in part]

    # The model's own class may define __call__ itself, as GeneralizedRCNNWithTTA does, and the
    # project's code may ask for the model's class, so this derives a class from it.
    change_class(model, type(original.__name__, (original,), {"__call__": call}))
    try:
        with retries.oom_log.explained("evaluation"):
            yield
    finally:
        change_class(model, original)


class _BatchRetries(Retries):
    """How the batches of an evaluation come again. A piece is a batch, in a tuple."""

    def __init__(self, model: nn.Module, oom_log: OomLog) -> None:
        super().__init__(next(model.parameters()).device)
        self.oom_log = oom_log
        self._model = model
        self._is_on_host = False
        self._is_one_by_one = False
        self._waiting: deque[tuple[Any]] = deque()

    def put(self, batch: Any) -> None:
        """Take this batch next, cut into images if that was needed before."""
        is_cut = self._is_one_by_one and isinstance(batch, list) and len(batch) > 1
        self._waiting = deque(([image],) for image in batch) if is_cut else deque([(batch,)])

    def take(self) -> Optional[tuple[Any]]:
        return self._waiting.popleft() if self._waiting else None

    def copy(self) -> StateCopy:
        # Detectron2's test-time augmentation turns heads off, and an error leaves them so.
        return StateCopy(self._model, is_watched=False)

    def around(self, piece: tuple[Any]) -> AbstractContextManager[Any]:
        return results_on_host(self._model) if self._is_on_host else nullcontext()

    def describe(self, error: Exception, piece: tuple[Any]) -> OomEvent:
        return self.oom_log.event(error, "evaluation", *piece)

    def react(self, failure: OomEvent, piece: tuple[Any]) -> str:
        (batch,) = piece
        if not self._is_on_host and can_have_results_on_host(self._model):
            self._is_on_host = True
            action = "results are post-processed on the host"
        elif isinstance(batch, list) and len(batch) > 1:
            self._is_one_by_one = True
            action = "the images are run one at a time"
        else:
            self.oom_log.log(failure, RAISE)
            return self.oom_log.final_message(failure)
        self.oom_log.log(failure, action)
        if self._waiting:  # other images of a batch that is cut
            self._waiting.appendleft(piece)
        else:
            self.put(batch)
        return ""
