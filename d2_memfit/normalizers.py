"""What a loss is divided by: for a criterion of one's own, the count of the whole window."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Optional, Protocol, TypeVar

import torch
import torch.distributed as dist
from detectron2.utils import comm

__all__ = ["Counts", "counts_answered_by", "window_count", "window_share"]

Number = TypeVar("Number", float, torch.Tensor)


class Counts(Protocol):
    """Who knows the window while its micro-batches run: the trainer."""

    @property
    def share(self) -> float:
        """Images of the micro-batch that runs, by those of the window on this rank."""
        ...

    def answer(self, count: Number, minimum: float) -> Number:
        """See :func:`window_count`."""
        ...


_answering: Optional[Counts] = None


@contextmanager
def counts_answered_by(counts: Counts) -> Iterator[None]:
    """While open, :func:`window_count` asks ``counts``."""
    global _answering  # noqa: PLW0603  model code asks, and knows no trainer
    outer, _answering = _answering, counts
    try:
        yield
    finally:
        _answering = outer


def window_count(count: Number, minimum: float = 1.0) -> Number:
    """What to divide a loss by that is a sum over objects, positives, or the like.

    Call it in a criterion, once in each forward for each count, in place of an ``all_reduce`` and a
    ``clamp``::

        num_boxes = window_count(sum(len(t["labels"]) for t in targets))
        loss = l1.sum() / num_boxes

    While an :class:`AccumulatingTrainer` accumulates, it gives this micro-batch's share of the
    count of all micro-batches of all ranks, so that the sum of their gradients is the gradient of
    one forward over all images. Elsewhere it gives the mean over ranks, as that ``all_reduce`` did.

    Args:
        count: of the batch that is in this forward; a number, or a tensor with one element, which
            is left on its device.
        minimum: the whole window's count is taken to be at least this.
    """
    if _answering is not None:
        return _answering.answer(count, minimum)
    if isinstance(count, torch.Tensor):
        count = count.detach().float()
        if comm.get_world_size() > 1:
            count = count.clone()
            dist.all_reduce(count)
            count = count / comm.get_world_size()
        return count.clamp(min=minimum)
    return max(sum(comm.all_gather(count)) / comm.get_world_size(), minimum)


def window_share() -> float:
    """Images of this forward, by those of its window on this rank: 1 where nothing accumulates."""
    return 1.0 if _answering is None else _answering.share
