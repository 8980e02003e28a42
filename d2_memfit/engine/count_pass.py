# Copyright (c) the d2_memfit developers.
"""A window's forwards without gradients, run only to take its counts."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from detectron2.utils.events import EventStorage, get_event_storage
from torch import nn

from ..errors import OutOfMemoryError
from ..memory import is_out_of_memory, release_memory
from .count_rules import Site
from .forward_counts import ForwardCounts
from .snapshot import Snapshot
from .window import MicroBatch, Window

__all__ = ["count_window", "does_the_same_with_ranks", "without_traces"]

logger = logging.getLogger(__name__)


@contextmanager
def without_traces(model: nn.Module) -> Iterator[None]:
    """Run forwards without gradients that leave the model, random states and log unchanged."""
    snapshot = Snapshot(model)
    try:
        with torch.no_grad(), EventStorage(get_event_storage().iter):
            yield
    finally:
        snapshot.restore()


def does_the_same_with_ranks(
    model: nn.Module,
    micro_batch: MicroBatch,
    forward: Callable[[MicroBatch], Any],
    new_counts: Callable[[bool], ForwardCounts],
    recovers: bool,
) -> bool:
    """Whether a model that is told of a second rank takes counts and computes the same losses.

    Args:
        new_counts: makes a :class:`ForwardCounts`; its argument says whether to pretend a second
            rank.
        recovers: whether a forward that does not fit is tried once more.
    """
    losses = []
    for pretends in (False, True):
        try:
            for _ in range(2):  # freed caches may be enough
                counts = new_counts(pretends)
                with without_traces(model):
                    fits = _fits(micro_batch, forward, recovers)
                if fits:
                    break
                release_memory(next(model.parameters()).device)
            else:
                raise OutOfMemoryError("its images did not fit while its counts were looked for")
        except Exception as e:  # a model without another rank may raise anything
            if not pretends and not isinstance(e, OutOfMemoryError):
                raise
            logger.warning(
                "The model cannot be told that there are ranks (%s: %s), so the counts that it "
                "would add up over ranks are those of each micro-batch",
                type(e).__name__,
                e,
            )
            return False
        losses.append(micro_batch.losses)
    if not any(site.kind == "ranks" for site in counts.seen):
        return False
    is_same = all(
        torch.allclose(loss.float(), losses[1][name].float(), equal_nan=True)
        for name, loss in losses[0].items()
    )
    if not is_same:
        logger.warning(
            "The model's losses are other ones when it is told that there are ranks, so the counts "
            "that it would add up over ranks are those of each micro-batch"
        )
    return is_same


def count_window(
    model: nn.Module,
    window: Window,
    take: tuple[Optional[int], bool],
    forward: Callable[[MicroBatch], Any],
    new_counts: Callable[[], ForwardCounts],
    recovers: bool,
) -> dict[Site, float]:
    """Run a window's forwards to take its counts, then put its images back.

    Args:
        take: arguments of :meth:`Window.take`.
        new_counts: makes a :class:`ForwardCounts` for each forward.
        recovers: whether images that do not fit are run again in smaller pieces. An image that does
            not fit alone is left out. Training handles it later with stronger means.

    Returns:
        dict: the sum of all counts at each site.
    """
    totals: dict[Site, float] = {}
    images, across_batches = take
    hopeless = None
    with without_traces(model):
        while (micro_batch := window.take(images, across_batches)) is not None:
            counts = new_counts()
            if _fits(micro_batch, forward, recovers):
                for site, seen in counts.seen.items():
                    totals[site] = totals.get(site, 0.0) + sum(s.value for s in seen)
            else:
                release_memory(next(model.parameters()).device)
                if micro_batch.can_be_split:
                    images = micro_batch.num_images // 2
                if micro_batch.can_be_split or micro_batch.data is not hopeless:
                    hopeless = micro_batch.data  # if it fails once more
                    window.put_back()
    window.start_over()
    return totals


def _fits(micro_batch: MicroBatch, forward: Callable[[MicroBatch], Any], recovers: bool) -> bool:
    try:
        forward(micro_batch)
    except Exception as e:
        if not (recovers and is_out_of_memory(e)):
            raise
        logger.info("%d images did not fit while their counts were taken", micro_batch.num_images)
        return False
    return True
