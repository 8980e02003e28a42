# Copyright (c) the d2_memfit developers.
"""Evaluation that continues with the same results after a batch did not fit."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Optional

from torch import nn

from ... import compat
from ...errors import OutOfMemoryError
from ...job import RecoveryOptions
from ...memory import is_out_of_memory, release_memory
from ...techniques import can_have_results_on_host, results_on_host
from ..state import Snapshot
from .oom_record import RAISE, Failure, OomEvent, OomRecord, explained_memory_error, final_error

__all__ = ["recovering_inference"]

logger = logging.getLogger(__name__)


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
    original = type(model)
    recovering = _RecoveringCall(model, options)
    # The model's own class may define __call__ itself, as GeneralizedRCNNWithTTA does, and the
    # project's code may ask for the model's class, so this derives a class from it.
    model.__class__ = type(
        original.__name__, (original,), {"__call__": lambda self, batch: recovering(batch)}
    )
    bare = compat.without_ddp(model)
    try:
        with explained_memory_error("evaluation", list, bare, options, mixed_precision=False):
            yield
    finally:
        model.__class__ = original


class _RecoveringCall:
    def __init__(self, model: nn.Module, options: RecoveryOptions) -> None:
        self._call = partial(type(model).__call__, model)
        self._model = compat.without_ddp(model)
        self._device = next(model.parameters()).device
        self._options = options
        self._record = OomRecord(options.output_dir)
        self._on_host = False
        self._one_by_one = False

    def __call__(self, batch: Any) -> Any:
        if self._one_by_one and _is_list_of_many(batch):
            return [result for image in batch for result in self([image])]
        before = None
        try:
            # Detectron2's test-time augmentation turns heads off, and an error leaves them so.
            before = Snapshot(self._model, is_watched=False)
            with results_on_host(self._model) if self._on_host else nullcontext():
                return self._call(batch)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            failure = Failure(e, "evaluation", self._device)
        if before is not None:
            before.restore()
        release_memory(self._device)
        self._ease(failure, batch)
        return self(batch)

    def _ease(self, failure: Failure, batch: Any) -> None:
        event = OomEvent.of(failure, batch, self._model, self._options.budget_gb)
        if not self._on_host and can_have_results_on_host(self._model):
            self._on_host = True
            event.action = "results are post-processed on the host"
        elif _is_list_of_many(batch):
            self._one_by_one = True
            event.action = "the images are run one at a time"
        else:
            event.action = RAISE
        self._record.append(event)
        logger.warning("%s. Now %s", event, event.action)
        if event.action == RAISE:
            raise OutOfMemoryError(final_error(event, self._options, mixed_precision=False))


def _is_list_of_many(batch: Any) -> bool:
    return isinstance(batch, list) and len(batch) > 1
