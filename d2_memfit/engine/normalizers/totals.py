# Copyright (c) the d2_memfit developers.
"""The counts of a window, before its first forward."""

from collections.abc import Callable
from functools import partial
from typing import Any, Optional

from torch import nn

from ...memory import is_out_of_memory, with_room
from ..window import MicroBatch, Window
from .trial_forwards import without_traces

__all__ = ["run_for_counts"]


def run_for_counts(
    model: nn.Module,
    window: Window,
    take: tuple[Optional[int], bool],
    forward: Callable[[MicroBatch], Any],
    recovers: bool,
) -> None:
    """Run a window's forwards without gradients, for their counts, then put its images back.

    Args:
        take: arguments of :meth:`Window.take`.
        recovers: whether images that do not fit are run again in smaller pieces. An image that does
            not fit alone is left out. Training handles it later with stronger means.
    """
    images, across_batches = take
    device = next(model.parameters()).device
    run = partial(with_room, device=device) if recovers else _run
    try:
        with without_traces(model):
            while (micro_batch := window.take(images, across_batches)) is not None:
                try:
                    run(partial(forward, micro_batch))
                except Exception as e:
                    if not (recovers and is_out_of_memory(e)):
                        raise
                    if micro_batch.can_be_split:
                        images = micro_batch.num_images // 2
                        window.put_back()
    finally:
        window.start_over()


def _run(forward: Callable[[], Any]) -> None:
    forward()
