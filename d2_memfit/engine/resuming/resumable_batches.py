# Copyright (c) the d2_memfit developers.
"""Batches of Detectron2's training loader, whose order can be saved and resumed."""

import copy
import hashlib
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, Optional

import torch
from detectron2.data.common import AspectRatioGroupedDataset, ToIterableDataset
from torch.utils.data import DataLoader

from ... import compat
from ...common.random_state import RandomState
from ...compat.pytorch import workers_of
from .loader_worker import Layout, Rest, RestOfStream, ResumedImages, WithStates
from .signals import signals_held_back

__all__ = ["ResumableBatches", "UnknownLoader"]

_DIGESTED = 1000  # images


class UnknownLoader(TypeError):
    """The order of a loader's batches is not known. The message names the loader."""


class ResumableBatches(Iterator[Any]):
    """The batches of a ``build_detection_train_loader`` loader, to the last bit, with a state.

    The state contains the number of batches taken from the sampler's endless stream, and the random
    states of the loader's workers after the last batch. It also says how to reload images that
    still wait for others of their aspect ratio. It does not contain prefetched images.

    With the same numbers of ranks, workers and images per batch, a resumed stream continues to the
    last bit. With other numbers, the remaining images are distributed again in their order. None is
    lost or used twice.

    Args:
        loader: made by ``build_detection_train_loader``. It is not changed.

    Attributes:
        images: loads and maps the images of the dataset, by their indices.
        group_size: images of one aspect ratio that are grouped; 0 if they are not.

    Raises:
        UnknownLoader: it is another kind of loader.
    """

    def __init__(self, loader: Any) -> None:
        self.group_size = 0
        self._collate, loader = compat.split_map(loader)  # of groups
        if type(loader) is AspectRatioGroupedDataset:
            self.group_size = loader.batch_size
            loader = loader.dataset
        dataset: Any = getattr(loader, "dataset", None)
        is_known = type(loader) is DataLoader and type(dataset) is ToIterableDataset
        if not is_known or loader.batch_size is None:
            raise UnknownLoader(f"a {type(loader).__name__}")
        sampler = dataset.sampler
        if not dataset.shard_sampler or not compat.deals_its_indices(sampler):
            raise UnknownLoader(f"one with a {type(sampler).__name__}")
        self._loader = loader
        self.num_workers: int = loader.num_workers
        self.images = dataset.dataset
        self._sampler = sampler
        self._layout = Layout(
            ranks=compat.num_ranks_of(sampler),
            workers=max(1, self.num_workers),
            chunk=getattr(dataset, "shard_chunk_size", 1),
            batch=loader.batch_size,
        )
        self._read_from(Rest(0, torch.tensor([], dtype=torch.int64)))

    def _read_from(self, rest: Rest, taken: Optional["_Taken"] = None) -> None:
        taken = taken or _Taken(workers=(None,) * self.num_workers)
        self._rest = rest
        sampler = RestOfStream(self._sampler, rest)
        is_grouped = self.group_size > 0
        self._received = _Received(self._loader, sampler, self._layout, is_grouped, taken)
        self._batches: Iterator[Any] = self._received
        if is_grouped:
            self._batches = _grouped(self._received, self.group_size)
            if self._collate is not None:  # Detectron2 drops a batch that is None
                collated = map(self._collate, self._batches)
                self._batches = (batch for batch in collated if batch is not None)

    def __iter__(self) -> Iterator[Any]:
        """Start when Detectron2 does, because the workers' seeds are drawn then."""
        if not self.group_size and self._received.source is None:
            self._received.start_workers()
        return self

    def __next__(self) -> Any:
        iter(self)
        return next(self._batches)

    def has_killed_worker(self) -> bool:
        """Whether a worker was ended with SIGKILL, as by the kernel when RAM is full."""
        return -9 in [worker.exitcode for worker in workers_of(self._received.source)]

    @cached_property
    def _digest(self) -> str:
        """A digest of names and sizes of images, spread over the dataset; "" if they have none."""
        images = compat.inner_dataset(self.images)
        num_images = len(self.images)
        try:
            keys = [
                _image_key(images[i]) for i in range(0, num_images, 1 + num_images // _DIGESTED)
            ]
        except (AttributeError, LookupError, TypeError):
            return ""
        return hashlib.sha256(repr(keys).encode()).hexdigest()

    def undo_point(self) -> Callable[[], None]:
        """A function that restores the state, for a checkpoint of this moment.

        The batches themselves are not repeated.
        """
        return partial(setattr, self._received, "taken", self._received.taken)

    def packed(self) -> tuple[Any, ...]:
        """The state of this rank, quick to make and to send."""
        taken = self._received.taken
        waiting = [(w.number, int(w.index), w.random_states) for w in taken.waiting]
        return taken.batches, taken.workers, taken.seeds, waiting

    @staticmethod
    def unpacked(state: tuple[Any, ...]) -> dict[str, Any]:
        """A :meth:`packed` state in plain types and tensors, for a checkpoint."""
        batches, workers, seeds, waiting = state
        return {
            "batches": batches,
            "workers": [states and pickle.loads(states) for states in workers],
            "seeds": seeds,
            "waiting": [(number, index, pickle.loads(states)) for number, index, states in waiting],
        }

    def stream(self) -> dict[str, Any]:
        """The state that all ranks share, in plain types and tensors."""
        drawn = {k: v for k, v in vars(self._sampler).items() if k in compat.DRAWN_BY_SAMPLERS}
        return {
            "layout": {**asdict(self._layout), "group": self.group_size},
            "rest": {"first": self._rest.first, "without": self._rest.without},
            "dataset_size": len(self.images),
            "dataset_digest": self._digest,
            "sampler": {"type": type(self._sampler).__name__, **drawn},
        }

    def load_state_dict(self, stream: dict[str, Any], ranks: list[dict[str, Any]]) -> bool:
        """Continue a run from its :meth:`stream` and the states of all its ranks.

        The random states of this process do not change.

        Returns:
            bool: whether the numbers of ranks, workers and images per batch are the same as before.

        Raises:
            ValueError: the dataset or the sampler is not the same.
        """
        drawn = dict(stream["sampler"])
        size = len(self.images)
        then = f"{stream['dataset_size']} images by a {drawn.pop('type')}"
        now = f"{size} images by a {type(self._sampler).__name__}"
        if then != now:
            raise ValueError(f"{then} then, {now} now")
        digest = stream.get("dataset_digest", "")
        if digest and self._digest and digest != self._digest:
            raise ValueError(f"{then} then and now, of other names or sizes")
        self._sampler = copy.copy(self._sampler)
        vars(self._sampler).update(drawn)
        options = dict(stream["layout"])
        group_size = options.pop("group")
        layout = Layout(**options)
        rest = Rest(**stream["rest"])
        is_same = (layout, group_size) == (self._layout, self.group_size)
        rank = compat.rank_of(self._sampler)
        is_same = is_same and len(ranks[rank]["workers"]) == self.num_workers
        if is_same:
            self._read_from(rest, _Taken.from_state(ranks[rank], self.images))
        else:
            self._read_from(rest.after(_places(layout, ranks)))
        self._received.start_workers()  # draws the seeds now: later, other numbers are due
        return is_same


@dataclass(frozen=True)
class _Waiting:
    """An image that waits for others of its aspect ratio, with what reloads it."""

    image: Any
    number: int  # among the rank's images
    index: int  # in the dataset
    random_states: bytes  # before it was loaded, pickled


@dataclass(frozen=True)
class _Taken:
    """The part of a rank's loader that it took since the rest of the stream began."""

    batches: int = 0  # of the loader; single images if they are grouped
    workers: tuple[Optional[bytes], ...] = ()  # random states of each after its last batch, pickled
    seeds: Optional[torch.Tensor] = None  # state of the generator that workers' seeds come from
    waiting: tuple[_Waiting, ...] = ()  # images without a group yet

    @classmethod
    def from_state(cls, state: dict[str, Any], images: Any) -> "_Taken":
        """Restore a state, and reload the images that waited."""
        own = RandomState()
        waiting = []
        for number, index, states in state["waiting"]:
            RandomState.from_state_dict(states).restore()
            waiting.append(_Waiting(images[index], number, index, pickle.dumps(states)))
        own.restore()
        workers = [states and pickle.dumps(states) for states in state["workers"]]
        return cls(state["batches"], tuple(workers), state["seeds"], tuple(waiting))


class _Received(Iterator[Any]):
    """A loader's batches, or its images if they are grouped, without random states.

    Args:
        loader, sampler, layout: their source.
        is_grouped: whether they are grouped by aspect ratio afterwards.
        taken: what was taken before.

    Attributes:
        taken: what has been taken by now.
    """

    def __init__(
        self,
        loader: Any,
        sampler: RestOfStream,
        layout: Layout,
        is_grouped: bool,
        taken: _Taken,
    ) -> None:
        self.taken = taken
        self._loader = copy.copy(loader)
        vars(self._loader)["dataset"] = ResumedImages(
            loader.dataset, sampler, layout, taken.batches, taken.workers, is_grouped
        )
        self._loader.collate_fn = WithStates(loader.collate_fn)
        self._is_grouped = is_grouped
        self.source: Optional[Iterator[Any]] = None

    def start_workers(self) -> None:
        """Seed and start the workers."""
        if self.taken.seeds is not None:
            self._loader.generator = torch.Generator()
            self._loader.generator.set_state(self.taken.seeds)
        seeds = (self._loader.generator or torch.default_generator).get_state()
        self.taken = replace(self.taken, seeds=seeds)
        with signals_held_back():  # until the workers can leave them to this process
            self.source = iter(self._loader)
        # Garbage collection takes the queues of an iterator in a cycle first: each of its workers
        # is then waited for, 5 s. So a trainer's cycles do not have it.
        weakref.finalize(self, _forget, self.source)

    def __next__(self) -> Any:
        if self.source is None:
            self.start_workers()
        assert self.source is not None
        states = None
        while states is None:
            batch, states = next(self.source)
        index, before, after = states
        number = self.taken.batches
        workers = list(self.taken.workers)
        waiting = self.taken.waiting
        if after is not None:
            workers[number % len(workers)] = after
        if self._is_grouped:
            waiting += (_Waiting(batch, number, index, before),)
        self.taken = _Taken(number + 1, tuple(workers), self.taken.seeds, waiting)
        return batch


def _forget(source: Iterator[Any]) -> None:
    """Let an iterator end."""


def _grouped(received: _Received, size: int) -> Iterator[Any]:
    """Groups of images of one aspect ratio, made as in Detectron2."""
    reloaded = [waiting.image for waiting in received.taken.waiting]
    for group in AspectRatioGroupedDataset(chain(reloaded, received), size):
        gone = set(map(id, group))
        waiting = tuple(w for w in received.taken.waiting if id(w.image) not in gone)
        received.taken = replace(received.taken, waiting=waiting)
        yield group


def _image_key(image: dict[str, Any]) -> tuple[Any, ...]:
    """The key of an image, wherever its folder is."""
    name = image.get("file_name", image.get("image_id"))
    return os.path.basename(str(name)), image.get("height"), image.get("width")


def _places(layout: Layout, ranks: list[dict[str, Any]]) -> torch.Tensor:
    """Places in the stream of all taken batches, without images that still wait."""
    places = []
    for rank, state in enumerate(ranks):
        of_rank = layout.places(rank, state["batches"])
        keep = torch.ones(len(of_rank), dtype=torch.bool)
        keep[[number for number, _, _ in state["waiting"]]] = False
        places.append(of_rank[keep].flatten())
    return torch.cat(places)
