# Copyright (c) the d2_memfit developers.
"""Counts over the whole window, for a criterion of your own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Optional, Protocol, TypeVar, Union

import torch
import torch.distributed as dist
from detectron2.utils import comm

__all__ = ["Counts", "counts_answered_by", "mean_factor", "window_count", "window_share"]

Number = TypeVar("Number", float, torch.Tensor)


class Counts(Protocol):
    """The source of the window's counts while its micro-batches run: the trainer."""

    @property
    def share(self) -> float:
        """Images of the running micro-batch over those of the window on this rank."""
        ...

    def answer(self, count: Number, minimum: float, of_rank: bool) -> Number:
        """Answer a call of :func:`window_count` or, ``of_rank``, :func:`mean_factor`."""
        ...


_answering: Optional[Counts] = None


@contextmanager
def counts_answered_by(counts: Counts) -> Iterator[None]:
    """While open, :func:`window_count` asks ``counts``."""
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
        count: the count of the batch in this forward: a number, or a tensor with one element, which
            stays on its device.
        minimum: lower limit of the whole window's count.
    """
    if _answering is not None:
        return _answering.answer(count, minimum, of_rank=False)
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
    if _answering is None:
        return 1.0
    if isinstance(count, torch.Tensor):
        return count.clamp(min=1) / _answering.answer(count, 1.0, of_rank=True)
    return max(count, 1) / _answering.answer(count, 1.0, of_rank=True)


def window_share() -> float:
    """Images of this forward over those of its window on this rank; 1 without accumulation."""
    return 1.0 if _answering is None else _answering.share
