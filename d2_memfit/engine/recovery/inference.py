# Copyright (c) the d2_memfit developers.
"""Evaluation that continues with the same results after a batch did not fit."""

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
from .oom_record import RAISE, OomRecord

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
    original = type(model)
    recovering = _RecoveringCall(model, options)
    # The model's own class may define __call__ itself, as GeneralizedRCNNWithTTA does, and the
    # project's code may ask for the model's class, so this derives a class from it.
    model.__class__ = type(
        original.__name__, (original,), {"__call__": lambda self, batch: recovering(batch)}
    )
    try:
        with recovering.record.explained("evaluation"):
            yield
    finally:
        model.__class__ = original


class _RecoveringCall:
    def __init__(self, model: nn.Module, options: RecoveryOptions) -> None:
        self._call = partial(type(model).__call__, model)
        self._model = compat.without_ddp(model)
        self._device = next(model.parameters()).device
        self.record = OomRecord(options, self._model)
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
            event = self.record.event(e, "evaluation", batch)
        if before is not None:
            before.restore()
        release_memory(self._device)
        if not self._on_host and can_have_results_on_host(self._model):
            self._on_host = True
            self.record.log(event, "results are post-processed on the host")
        elif _is_list_of_many(batch):
            self._one_by_one = True
            self.record.log(event, "the images are run one at a time")
        else:
            self.record.log(event, RAISE)
            raise OutOfMemoryError(self.record.final_error(event))
        return self(batch)


def _is_list_of_many(batch: Any) -> bool:
    return isinstance(batch, list) and len(batch) > 1
