# Copyright (c) the d2_memfit developers.
"""Numbers in a model that count its forwards. Accumulation makes several per iteration."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...compat.pytorch import buffers_by_name
from ...memory import with_room
from .window import Window

__all__ = ["ForwardCounters", "numbers_of"]

logger = logging.getLogger(__name__)


class ForwardCounters:
    """Warns of a model's counters, once it runs several micro-batches per window.

    A counter is a one-element buffer or an integer attribute that grows by one per micro-batch.
    BoxInst's warm-up, for example, depends on its ``_iter``.

    Args:
        model: without DDP around it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        self._is_done = False

    @contextmanager
    def compared(self, window: Window) -> Iterator[None]:
        """Compare the counters before and after the first window with several micro-batches."""
        if self._is_done:
            yield
            return
        before = with_room(lambda: numbers_of(self._model), self._device)
        yield
        times = len(window.micro_batches)
        self._is_done = times > 1
        after = with_room(lambda: numbers_of(self._model), self._device) if self._is_done else {}
        for name, number in after.items():
            if name in before and float(number - before[name]) == times:
                logger.warning(
                    "%s counts forwards, %d times per iteration with accumulation. What depends "
                    "on it, such as a warm-up, comes earlier by that factor: lengthen it",
                    name,
                    times,
                )


def numbers_of(model: nn.Module) -> dict[str, Any]:
    """Numbers that may be counters, by name. Tensors are copied on their device, without a sync."""
    found = {}
    for path, part in model.named_modules():
        values = {k: v for k, v in vars(part).items() if type(v) is int}
        for name, buffer in buffers_by_name(part).items():
            # Batch normalisation counts forwards by this name, and uses it for nothing.
            is_counter = name != "num_batches_tracked" and buffer is not None
            if is_counter and buffer.numel() == 1 and buffer.dtype != torch.bool:
                values[name] = buffer.detach().clone()
        found.update({f"{path or type(model).__name__}.{k}": v for k, v in values.items()})
    return found
