# Copyright (c) the d2_memfit developers.
"""Batches of Detectron2's training loader, whose order can be saved and resumed."""

import copy
import multiprocessing
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from multiprocessing.util import Finalize
from typing import Any, Callable, Optional

import torch
from detectron2.data.common import AspectRatioGroupedDataset, ToIterableDataset
from detectron2.utils import comm
from torch.utils.data import DataLoader, IterableDataset, Sampler, get_worker_info

from ..common import compat
from ..common.compat import shut_down, workers_of
from ..common.side_work import RandomState
from .ending import leave_signals_to_parent, worker_deaths_wait


class UnknownLoader(TypeError):
    """The order of a loader's batches is not known. The message names the loader."""


class ResumableBatches(Iterator[Any]):
    """The batches of a ``build_detection_train_loader`` loader, to the last bit, with a state.

    The state has the number of batches that were taken, the random states of the loader's workers
    after the last one, and what reloads images that wait for others of their aspect ratio. It does
    not contain prefetched images.

    With the same numbers of ranks, workers and images per batch, a resumed stream continues to the
    last bit. With other numbers, it continues at the same number of images. Up to one batch of each
    worker is then lost, and as many come twice.

    Args:
        loader: made by ``build_detection_train_loader``. It is not changed.

    Attributes:
        images: loads and maps the images of the dataset, by their indices.
        layout: the distribution of the stream: "ranks", "workers" of each, images in a "batch" of
            a worker, and in a "group" of one aspect ratio (0 if they are not grouped).

    Raises:
        UnknownLoader: it is another kind of loader.
    """

    def __init__(self, loader: Any) -> None:
        group = 0
        self._collate, loader = compat.split_map(loader)  # of groups
        if type(loader) is AspectRatioGroupedDataset:
            group, loader = loader.batch_size, loader.dataset
        dataset: Any = getattr(loader, "dataset", None)
        is_known = type(loader) is DataLoader and type(dataset) is ToIterableDataset
        if not is_known or loader.batch_size is None:
            raise UnknownLoader(f"a {type(loader).__name__}")
        self._sampler = dataset.sampler
        if not dataset.shard_sampler or not compat.deals_its_indices(self._sampler):
            raise UnknownLoader(f"one with a {type(self._sampler).__name__}")
        self._loader, self._rank = loader, comm.get_rank()
        self.images = dataset.dataset
        self.layout: dict[str, int] = {
            "ranks": comm.get_world_size(),
            "workers": loader.num_workers,
            "batch": loader.batch_size,
            "group": group,
        }
        self._read_from(0)

    def _read_from(self, first: int, taken: Optional["_Taken"] = None) -> None:
        """Read the stream of all ranks from a place on, after what was taken from there."""
        taken = taken or _Taken(workers=(None,) * self.layout["workers"])
        self._first = first
        group = self.layout["group"]
        sampler = _RestOfStream(self._sampler, first // self.layout["ranks"])
        self._received = _Received(self._loader, sampler, taken, is_grouped=group > 0)
        self._batches: Iterator[Any] = self._received
        if group:
            self._batches = _grouped(self._received, group)
            if self._collate is not None:  # Detectron2 drops a batch that is None
                self._batches = (b for b in map(self._collate, self._batches) if b is not None)

    def __iter__(self) -> Iterator[Any]:
        """Start when Detectron2 does, because the workers' seeds are drawn then."""
        if not self.layout["group"] and self._received.source is None:
            self._received.start_workers()
        return self

    def __next__(self) -> Any:
        iter(self)
        return next(self._batches)

    def undo_point(self) -> Callable[[], None]:
        """A function that restores the state, for a checkpoint of this moment.

        The batches themselves are not repeated.
        """
        return partial(setattr, self._received, "taken", self._received.taken)

    def state(self) -> dict[str, Any]:
        """The state of this rank, in plain types and tensors."""
        taken = self._received.taken
        return {
            "batches": taken.batches,
            "workers": [states and pickle.loads(states) for states in taken.workers],
            "seeds": taken.seeds,
            "waiting": [(index, pickle.loads(states)) for _, index, states in taken.waiting],
        }

    def stream(self) -> dict[str, Any]:
        """The state that all ranks share, in plain types and tensors."""
        drawn = {k: v for k, v in vars(self._sampler).items() if k in compat.DRAWN_BY_SAMPLERS}
        return {
            "layout": self.layout,
            "first": self._first,
            "dataset_size": len(self.images),
            "sampler": {"type": type(self._sampler).__name__, **drawn},
        }

    def load_state_dict(
        self, stream: dict[str, Any], ranks: list[Optional[dict[str, Any]]]
    ) -> None:
        """Continue a run from its :meth:`stream` and the :meth:`state` of each of its ranks.

        The random states of this process do not change.

        Args:
            ranks: None for a rank whose state is not known. Its workers get other random numbers.

        Raises:
            ValueError: the dataset or the sampler is not the same.
        """
        drawn = dict(stream["sampler"])
        then = f"{stream['dataset_size']} images by a {drawn.pop('type')}"
        now = f"{len(self.images)} images by a {type(self._sampler).__name__}"
        if then != now:
            raise ValueError(f"{then} then, {now} now")
        self._sampler = copy.copy(self._sampler)
        vars(self._sampler).update(drawn)
        known = next(state for state in ranks if state)
        if stream["layout"] == self.layout:
            unknown = {**known, "workers": [None] * len(known["workers"]), "waiting": []}
            own = ranks[self._rank] or {**unknown, "seeds": None}
            self._read_from(stream["first"], _Taken.from_state(own, self.images))
        else:
            taken = sum((state or known)["batches"] for state in ranks) * stream["layout"]["batch"]
            self._read_from(stream["first"] + taken)
        self._received.start_workers()  # draws the seeds now: later, other numbers are due


@dataclass(frozen=True)
class _Taken:
    """What a rank took of its loader. It is replaced, never changed, so an undo can keep it."""

    batches: int = 0  # of the loader; single images if they are grouped
    workers: tuple[Optional[bytes], ...] = ()  # random states of each after its last batch, pickled
    seeds: Optional[torch.Tensor] = None  # state of the generator that workers' seeds come from
    # Images without a group yet, each with its index and the random states before it was loaded.
    waiting: tuple[tuple[Any, int, bytes], ...] = ()

    @classmethod
    def from_state(cls, state: dict[str, Any], images: Any) -> "_Taken":
        """Restore a state, and reload the images that waited."""
        own, waiting = RandomState(), []
        for index, states in state["waiting"]:
            RandomState(states=states).restore()
            waiting.append((images[index], index, pickle.dumps(states)))
        own.restore()
        workers = [states and pickle.dumps(states) for states in state["workers"]]
        return cls(state["batches"], tuple(workers), state["seeds"], tuple(waiting))


class _Received(Iterator[Any]):
    """A loader's batches, or its images if they are grouped afterwards, without random states.

    Attributes:
        taken: what has been taken by now.
        source: the loader's iterator, once its workers are started.
    """

    def __init__(self, loader: Any, sampler: Any, taken: _Taken, is_grouped: bool) -> None:
        self.taken = taken
        self.source: Optional[Iterator[Any]] = None
        self._is_grouped = is_grouped
        self._loader = copy.copy(loader)
        dataset = _ResumedImages(loader.dataset, sampler, loader.batch_size, taken, is_grouped)
        vars(self._loader)["dataset"] = dataset  # DataLoader refuses another one
        self._loader.collate_fn = partial(_with_states, loader.collate_fn)
        self._loader.worker_init_fn = partial(_start_worker, loader.worker_init_fn)

    def start_workers(self) -> None:
        """Seed and start the workers."""
        if self.taken.seeds is not None:
            self._loader.generator = torch.Generator()
            self._loader.generator.set_state(self.taken.seeds)
        seeds = (self._loader.generator or torch.default_generator).get_state()
        self.taken = replace(self.taken, seeds=seeds)
        self.source = iter(self._loader)
        # Garbage collection takes the queues of an iterator in a cycle first: each of its workers
        # is then waited for, 5 s. So a trainer's cycles do not have it.
        # At the exit of a rank, before its queues are closed (with priority 10).
        Finalize(self, _end_workers, [self.source], exitpriority=100)

    def __next__(self) -> Any:
        if self.source is None:
            self.start_workers()
        assert self.source is not None
        states = None
        while states is None:
            batch, states = next(self.source)
        index, before, after = states
        taken = self.taken
        workers, waiting = list(taken.workers), taken.waiting
        if after is not None:
            workers[taken.batches % len(workers)] = after
        if self._is_grouped:
            waiting += ((batch, index, before),)
        self.taken = _Taken(taken.batches + 1, tuple(workers), taken.seeds, waiting)
        return batch


def _end_workers(source: Iterator[Any]) -> None:
    """End the workers of a loader's iterator. They hear no SIGTERM, which PyTorch would send."""
    with worker_deaths_wait():
        try:
            shut_down(source)
        finally:
            for worker in set(workers_of(source)) & set(multiprocessing.active_children()):
                worker.kill()
                worker.join()


def _grouped(received: _Received, size: int) -> Iterator[Any]:
    """Groups of images of one aspect ratio, made as in Detectron2."""
    reloaded = [image for image, _, _ in received.taken.waiting]
    for group in AspectRatioGroupedDataset(chain(reloaded, received), size):
        gone = set(map(id, group))
        waiting = tuple(w for w in received.taken.waiting if id(w[0]) not in gone)
        received.taken = replace(received.taken, waiting=waiting)
        yield group


class _RestOfStream(Sampler[int]):
    """A Detectron2 training sampler from one of its rank's indices on."""

    def __init__(self, sampler: Any, first: int) -> None:
        self._sampler = sampler
        self._first = first

    def __iter__(self) -> Iterator[int]:
        return islice(self._sampler, self._first, None)


class _ResumedImages(IterableDataset[Any]):
    """Detectron2's ``ToIterableDataset``, continued after the batches that were taken.

    Yields:
        ``(image, index, states)``: the random states before its loading, if they are kept. To keep
        the order of the workers, those that come before the next one in turn first yield a whole
        batch of Nones.
    """

    def __init__(
        self, dataset: Any, sampler: _RestOfStream, batch: int, taken: _Taken, keeps_states: bool
    ) -> None:
        self._images = dataset.dataset
        self._indices = copy.copy(dataset)  # shards indices among workers, as it did images
        self._indices.dataset = range(len(dataset.dataset))
        self._indices.sampler = sampler
        self._batch = batch
        self._batches, self._workers = taken.batches, taken.workers
        self._keeps_states = keeps_states

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        done = len(range(worker, self._batches, workers))  # batches of this worker
        if info is not None:
            if (states := self._workers[worker]) is not None:
                RandomState(states=pickle.loads(states)).restore()
            if worker < self._batches % workers:
                yield from [None] * self._batch
        for index in islice(self._indices, done * self._batch, None):
            states = pickle.dumps(RandomState().states) if self._keeps_states else None
            yield self._images[index], index, states


def _with_states(collate: Callable[[list[Any]], Any], rows: list[Any]) -> tuple[Any, Any]:
    """Collate a batch, and add the worker's random states.

    Returns:
        ``(batch, (index, states before, states after))``: the first two belong to the first image;
        the last is None in the main process. A batch of Nones gives ``(None, None)``.
    """
    if rows[0] is None:
        return None, None
    batch = collate([image for image, _, _ in rows])
    after = None if get_worker_info() is None else pickle.dumps(RandomState().states)
    return batch, (*rows[0][1:], after)


def _start_worker(init: Optional[Callable[[int], None]], worker: int) -> None:
    leave_signals_to_parent()
    if init is not None:
        init(worker)
