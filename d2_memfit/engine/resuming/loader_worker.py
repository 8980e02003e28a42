# Copyright (c) the d2_memfit developers.
"""Detectron2's dataset, continued from a position: in the workers of a resumable loader."""

import copy
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Callable, Optional

import torch
from detectron2.data.common import ToIterableDataset
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from ... import compat
from ...common.random_state import RandomState
from .signals import leave_signals_to_parent

__all__ = ["Layout", "Rest", "RestOfStream", "ResumedImages", "WithStates"]


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


class RestOfStream(Sampler[int]):
    """A Detectron2 training sampler that skips taken places, before it distributes to ranks.

    Args:
        sampler: its order must be a function of its attributes.
    """

    def __init__(self, sampler: Any, rest: Rest) -> None:
        self._sampler = sampler
        self._first = rest.first
        self._without = set(rest.without.tolist())

    def __iter__(self) -> Iterator[int]:
        places = enumerate(compat.endless_indices(self._sampler))
        rest = (
            index for place, index in places if place >= self._first and place not in self._without
        )
        ranks = compat.num_ranks_of(self._sampler)
        return islice(rest, compat.rank_of(self._sampler), None, ranks)


class ResumedImages(IterableDataset[Any]):
    """Detectron2's ``ToIterableDataset``, continued after the first batches.

    Args:
        dataset: with its sampler, as Detectron2 made it.
        sampler: source of indices in place of the dataset's.
        batches: number of batches that the rank has taken.
        workers: pickled random states of each worker after these; None if there are none.
        keeps_states: whether each image comes with the random states before its loading.

    Yields:
        ``(image, index, states)``. To keep the order of the workers, those that come before the
        next worker in turn first yield a whole batch of Nones.
    """

    def __init__(
        self,
        dataset: ToIterableDataset,
        sampler: RestOfStream,
        layout: Layout,
        batches: int,
        workers: Sequence[Optional[bytes]],
        keeps_states: bool,
    ) -> None:
        self._images = dataset.dataset
        self._indices = copy.copy(dataset)  # shards indices among workers, as it did images
        self._indices.dataset = _Itself()
        self._indices.sampler = sampler
        self._layout = layout
        self._batches = batches
        self._workers = workers
        self._keeps_states = keeps_states

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if info is not None:
            leave_signals_to_parent()
            state = self._workers[worker]
            if state is not None:
                RandomState.from_state_dict(pickle.loads(state)).restore()
            if worker < self._batches % self._layout.workers:
                yield from [None] * self._layout.batch
        start = self._layout.images_of_worker(worker, self._batches)
        for index in islice(self._indices, start, None):
            states = _packed_random_state() if self._keeps_states else None
            yield self._images[index], index, states


class WithStates:
    """A collate function whose batches come with the worker's random states.

    Returns:
        ``(batch, (index, states before, states after))``: the first two belong to the first image;
        the last is None in the main process. A batch of Nones gives ``(None, None)``.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, rows: list[Any]) -> tuple[Any, Any]:
        if rows[0] is None:
            return None, None
        batch = self._collate([image for image, _, _ in rows])
        after = None if get_worker_info() is None else _packed_random_state()
        return batch, (*rows[0][1:], after)


def _packed_random_state() -> bytes:
    return pickle.dumps(RandomState().state_dict())


class _Itself(Dataset[Any]):
    """A dataset whose items are their own indices."""

    def __getitem__(self, index: int) -> int:
        return index
