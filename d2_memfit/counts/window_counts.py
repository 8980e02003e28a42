# Copyright (c) the d2_memfit developers.
"""Counts over the whole window, for a criterion of your own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, Union

import torch
import torch.distributed as dist
from detectron2.utils import comm

__all__ = ["counts_answered_by", "mean_factor", "window_count", "window_share"]

Number = TypeVar("Number", float, torch.Tensor)


# What answers while a trainer's micro-batches run.
_answering: Any = None


@contextmanager
def counts_answered_by(counts: Any) -> Iterator[None]:
    """While open, the functions below ask ``counts``: its ``count(own, minimum)``,
    ``factor(own, minimum)`` and ``share``.
    """
    global _answering  # noqa: PLW0603  model code asks, and knows no trainer
    outer = _answering
    _answering = counts
    try:
        yield
    finally:
        _answering = outer


def window_count(count: Number, minimum: float = 1.0) -> Number:
    """Divisor for a loss that is a sum over objects, positives, or the like.

    Call it in a criterion, once in each forward for each count, in place of an ``all_reduce`` and a
    ``clamp``::

        num_boxes = window_count(sum(len(t["labels"]) for t in targets))
        loss = l1.sum() / num_boxes

    While an :class:`AccumulatingTrainer` accumulates, it returns this micro-batch's share of the
    count of all micro-batches of all ranks. The sum of their gradients is then the gradient of one
    forward over all images. Elsewhere it returns the mean over ranks, as the ``all_reduce`` did.

    Args:
        count: the count of the batch in this forward: a number, or a tensor, which stays on its
            device. A vector has the counts of several losses, or of classes.
        minimum: lower limit of the whole window's count.
    """
    if _answering is not None:
        return _answering.count(count, minimum)
    if isinstance(count, torch.Tensor):
        count = count.detach().float()
        if comm.get_world_size() > 1:
            count = count.clone()
            dist.all_reduce(count)
            count = count / comm.get_world_size()
        return count.clamp(min=minimum)
    return max(sum(comm.all_gather(count)) / comm.get_world_size(), minimum)


def mean_factor(count: Union[float, torch.Tensor]) -> Union[float, torch.Tensor]:
    """Factor that makes a loss, a mean over ``count`` elements, the window's mean.

    It is 1 without accumulation: each rank then has its own mean.
    """
    return 1.0 if _answering is None else _answering.factor(count, 1.0)


def window_share() -> float:
    """Images of this forward over those of its window on this rank; 1 without accumulation."""
    return 1.0 if _answering is None else _answering.share
