"""Batches of Detectron2's training loader, whose order can be saved and taken up again."""

import copy
import pickle
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, repeat, starmap
from typing import Any, Callable, NamedTuple, Optional

import torch
from detectron2.data.common import AspectRatioGroupedDataset, ToIterableDataset, _MapIterableDataset
from torch.utils.data import DataLoader

from .data_layout import Layout, Rest
from .loader_worker import Images, RestOfStream, WithStates
from .random_states import random_states, set_random_states

__all__ = ["ResumableBatches", "UnknownLoader"]


class UnknownLoader(TypeError):
    """The order of a loader's batches is not known. The text says what it is."""


class _Waiting(NamedTuple):
    """An image that waits for others of its aspect ratio, and what it takes to load it again."""

    image: Any
    number: int  # of the rank's images
    index: int  # in the dataset
    random_states: bytes  # before it was loaded, pickled


class ResumableBatches(Iterator[Any]):
    """What a loader of ``build_detection_train_loader`` gives, to the last bit, with a state.

    The state says how many batches of the sampler's endless stream were taken, the random states of
    the loader's workers after the last of these, and how to load the images again that still wait
    for others of their aspect ratio. What the workers loaded ahead is not part of it.

    With the same numbers of ranks, workers and images as before, a resumed stream goes on to the
    last bit. With others, the images that were not taken are dealt anew, in their order: none is
    lost, and none comes twice.

    Args:
        loader: as ``build_detection_train_loader`` makes it. It is not changed.

    Raises:
        UnknownLoader: it is of another kind.
    """

    def __init__(self, loader: Any) -> None:
        self._collate: Optional[Callable[[Any], Any]] = None  # of groups
        self._group_size = 0
        if type(loader) is _MapIterableDataset:
            self._collate, loader = loader._map_func, loader._dataset
        if type(loader) is AspectRatioGroupedDataset:
            self._group_size, loader = loader.batch_size, loader.dataset
        dataset = getattr(loader, "dataset", None)
        if type(loader) is not DataLoader or type(dataset) is not ToIterableDataset:
            raise UnknownLoader(f"a {type(loader).__name__}")
        sampler = dataset.sampler
        needed = ("_infinite_indices", "_seed", "_rank", "_world_size")
        if not dataset.shard_sampler or not all(hasattr(sampler, name) for name in needed):
            raise UnknownLoader(f"a loader with a {type(sampler).__name__}")
        self._loader = loader
        self._dataset = dataset
        self._sampler = sampler
        self._layout = Layout(
            ranks=sampler._world_size,
            workers=max(1, loader.num_workers),
            chunk=getattr(dataset, "shard_chunk_size", 1),
            batch=loader.batch_size,
        )
        self._start_at(Rest(0, torch.tensor([], dtype=torch.int64)))

    def _start_at(self, rest: Rest) -> None:
        self._rest = rest
        self._taken = 0  # batches of self._loader; single images, where they are grouped
        self._workers: list[Optional[bytes]] = [None] * self._loader.num_workers  # random states
        self._seeds: Optional[torch.Tensor] = None  # the generator that workers are seeded by
        self._waiting: list[_Waiting] = []
        self._source: Optional[Iterator[Any]] = None
        self._batches: Optional[Iterator[Any]] = None

    def __iter__(self) -> Iterator[Any]:
        if self._batches is None:
            self._begin()
        return self

    def __next__(self) -> Any:
        iter(self)
        assert self._batches is not None
        return next(self._batches)

    def _begin(self) -> None:
        """Seed the workers, and start them, at the moment at which Detectron2 does."""
        received = starmap(self._receive, repeat(()))  # other than a generator, it survives errors
        if not self._group_size:
            self._source = self._start_loader()
            self._batches = received
            return
        reloaded = [waiting.image for waiting in self._waiting]
        self._batches = self._grouped(chain(reloaded, received))
        if self._collate is not None:
            collated = map(self._collate, self._batches)
            self._batches = (batch for batch in collated if batch is not None)

    def _start_loader(self) -> Iterator[Any]:
        """Iterate the loader from behind what was taken."""
        loader = copy.copy(self._loader)
        vars(loader)["dataset"] = Images(
            self._dataset,
            RestOfStream(self._sampler, self._rest),
            self._layout,
            self._taken,
            self._workers,
            keeps_states=self._group_size > 0,
        )
        loader.collate_fn = WithStates(loader.collate_fn)
        if self._seeds is not None:
            loader.generator = torch.Generator()
            loader.generator.set_state(self._seeds)
        self._seeds = (loader.generator or torch.default_generator).get_state()
        return iter(loader)

    def _receive(self) -> Any:
        """The next batch of the loader, or image, where they are grouped."""
        if self._source is None:
            self._source = self._start_loader()
        states = None
        while states is None:
            batch, states = next(self._source)
        index, before, after = states
        if after is not None:
            self._workers[self._taken % len(self._workers)] = after
        if self._group_size:
            self._waiting.append(_Waiting(batch, self._taken, index, before))
        self._taken += 1
        return batch

    def _grouped(self, images: Iterator[Any]) -> Iterator[Any]:
        for batch in AspectRatioGroupedDataset(images, self._group_size):
            gone = set(map(id, batch))
            self._waiting = [w for w in self._waiting if id(w.image) not in gone]
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """What differs from rank to rank, in plain types and tensors."""
        return {
            "taken": self._taken,
            "workers": [state and pickle.loads(state) for state in self._workers],
            "seeds": self._seeds,
            "waiting": [
                (w.number, int(w.index), pickle.loads(w.random_states)) for w in self._waiting
            ],
        }

    def stream(self) -> dict[str, Any]:
        """What all ranks have in common, in plain types and tensors."""
        sampler = {k: v for k, v in vars(self._sampler).items() if k in _KEPT_OF_SAMPLERS}
        return {
            "layout": {**asdict(self._layout), "group": self._group_size},
            "rest": {"first": self._rest.first, "without": self._rest.without},
            "dataset_size": len(self._dataset.dataset),
            "sampler": {"type": type(self._sampler).__name__, **sampler},
        }

    def load_state_dict(self, stream: dict[str, Any], ranks: list[dict[str, Any]]) -> bool:
        """Go on where a run was, with its :meth:`stream` and the states of all its ranks.

        The random states of this process are afterwards what they were.

        Returns:
            bool: whether the numbers of ranks, workers and images are as they were.

        Raises:
            ValueError: the dataset or the sampler is another.
        """
        size, kept = len(self._dataset.dataset), dict(stream["sampler"])
        was, now = (stream["dataset_size"], kept.pop("type")), (size, type(self._sampler).__name__)
        if was != now:
            raise ValueError("{} images by a {}, and now {} by a {}".format(*was, *now))
        self._sampler = copy.copy(self._sampler)
        vars(self._sampler).update(kept)
        layout = dict(stream["layout"])
        group = layout.pop("group")
        then, rest = Layout(**layout), Rest(**stream["rest"])
        is_same = (then, group) == (self._layout, self._group_size)
        if is_same and len(ranks[self._sampler._rank]["workers"]) == self._loader.num_workers:
            self._start_at(rest)
            self._go_on(**ranks[self._sampler._rank])
        else:
            is_same = False
            self._start_at(rest.after(_taken_places(then, ranks)))
        self._begin()
        if self._source is None:
            self._source = self._start_loader()
        return is_same

    def _go_on(self, taken: int, workers: list[Any], seeds: Any, waiting: list[Any]) -> None:
        self._taken = taken
        self._workers = [state and pickle.dumps(state) for state in workers]
        self._seeds = seeds
        own = random_states()
        for number, index, states in waiting:
            set_random_states(states)
            image = self._dataset.dataset[index]
            self._waiting.append(_Waiting(image, number, index, pickle.dumps(states)))
        set_random_states(own)


_KEPT_OF_SAMPLERS = ("_seed", "_seed_subset", "_indexes_subset")  # they may have drawn these


def _taken_places(layout: Layout, ranks: list[dict[str, Any]]) -> torch.Tensor:
    """Places in the stream of all batches that were taken, but for images that still waited."""
    places = []
    for rank, state in enumerate(ranks):
        of_rank = layout.places(rank, state["taken"])
        keep = torch.ones(len(of_rank), dtype=torch.bool)
        keep[[number for number, _, _ in state["waiting"]]] = False
        places.append(of_rank[keep].flatten())
    return torch.cat(places)
