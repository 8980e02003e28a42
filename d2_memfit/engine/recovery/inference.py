# Copyright (c) the d2_memfit developers.
"""Evaluation that continues with the same results after a batch did not fit."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Optional

from torch import nn

from ... import compat
from ...errors import OutOfMemoryError
from ...memory import is_out_of_memory, release_memory
from ...settings import RecoveryOptions
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
    bare = compat.without_ddp(model)
    record = OomRecord(options, bare)
    device = next(model.parameters()).device
    original = type(model)
    is_on_host = False
    is_one_by_one = False

    def call(model: Any, batch: Any) -> Any:
        nonlocal is_on_host, is_one_by_one
        has_many = isinstance(batch, list) and len(batch) > 1
        if is_one_by_one and has_many:
            return [result for image in batch for result in call(model, [image])]
        before = None
        try:
            # Detectron2's test-time augmentation turns heads off, and an error leaves them so.
            before = Snapshot(bare, is_watched=False)
            with results_on_host(bare) if is_on_host else nullcontext():
                return original.__call__(model, batch)
        except Exception as e:
            if not is_out_of_memory(e):
                raise
            event = record.event(e, "evaluation", batch)
        release_memory(device)
        if before is not None:
            before.restore()
        if not is_on_host and can_have_results_on_host(bare):
            is_on_host = True
            record.log(event, "results are post-processed on the host")
        elif has_many:
            is_one_by_one = True
            record.log(event, "the images are run one at a time")
        else:
            record.log(event, RAISE)
            raise OutOfMemoryError(record.final_error(event))
        return call(model, batch)

    # The model's own class may define __call__ itself, as GeneralizedRCNNWithTTA does, and the
    # project's code may ask for the model's class, so this derives a class from it.
    model.__class__ = type(original.__name__, (original,), {"__call__": call})
    try:
        with record.explained("evaluation"):
            yield
    finally:
        model.__class__ = original
