# Copyright (c) the d2_memfit developers.
"""Places in the sampler's stream that all ranks and their loaders' workers have taken."""

from dataclasses import dataclass

import torch

__all__ = ["Layout", "Rest"]


@dataclass(frozen=True)
class Layout:
    """The distribution of a stream to ranks, workers and batches, as Detectron2 does it.

    Args:
        ranks: each takes every ``ranks``-th place.
        workers: workers of each rank; 1 if the loader has none.
        chunk: consecutive places that a worker takes: 1 in Detectron2 v0.6, a batch in main.
        batch: images that a worker returns at once; 1 if they are grouped by aspect ratio.
    """

    ranks: int
    workers: int
    chunk: int
    batch: int

    def images_of_worker(self, worker: int, batches: int) -> int:
        """Number of images of one worker among the first batches of a rank."""
        return (batches // self.workers + (worker < batches % self.workers)) * self.batch

    def places(self, rank: int, batches: int) -> torch.Tensor:
        """Places, in the stream of all ranks, of the first batches of one rank.

        Returns:
            Tensor: of int64, shape ``(batches, batch)``.
        """
        number = torch.arange(batches)[:, None]
        image = number // self.workers * self.batch + torch.arange(self.batch)  # its worker's
        chunks_before = image // self.chunk * self.workers + number % self.workers
        return rank + self.ranks * (chunks_before * self.chunk + image % self.chunk)


@dataclass(frozen=True)
class Rest:
    """The rest of a stream: all places from ``first`` on, without some.

    Args:
        first: a place in the stream.
        without: later places that were taken; sorted, of int64.
    """

    first: int
    without: torch.Tensor

    def after(self, places: torch.Tensor) -> "Rest":
        """The rest after some places are taken. Places count from the start of this rest."""
        reach = torch.cat([places + len(self.without), self.without - self.first])
        taken = torch.zeros(int(reach.max()) + 1 if len(reach) else 0, dtype=torch.bool)
        taken[self.without - self.first] = True
        taken[(~taken).nonzero()[places, 0]] = True
        left = (~taken).nonzero()[:, 0]
        first = int(left[0]) if len(left) else len(taken)
        return Rest(self.first + first, self.first + first + taken[first:].nonzero()[:, 0])
