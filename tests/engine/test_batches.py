# Copyright (c) the d2_memfit developers.
"""The order of the data, without a model."""

import io
import multiprocessing
import os
import random
import signal
from collections import Counter
from itertools import islice
from unittest.mock import patch

import numpy as np
import pytest
import torch
from detectron2.data import build_detection_train_loader
from detectron2.data.samplers import (
    RandomSubsetTrainingSampler,
    RepeatFactorTrainingSampler,
    TrainingSampler,
)
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng

from d2_memfit.common.side_work import RandomState
from d2_memfit.engine.batches import ResumableBatches, UnknownLoader
from d2_memfit.engine.ending import SIGNALS

SIZE = 23
DICTS = [{"image_id": i, "width": 4 + i % 3, "height": 5} for i in range(SIZE)]


class Mapper:
    """Adds numbers of all generators, as augmentations draw them."""

    def __call__(self, image):
        drawn = (random.random(), np.random.rand(), torch.rand(1).item(), random.gauss(0, 1))
        return {**image, "drawn": drawn}


def first_of(batch):
    return batch[0]


def sampler_of(name, rank=0, ranks=1):
    sampler = {
        "TrainingSampler": lambda: TrainingSampler(SIZE),
        "RepeatFactorTrainingSampler": lambda: RepeatFactorTrainingSampler(
            1 + torch.arange(SIZE) / SIZE
        ),
        "RandomSubsetTrainingSampler": lambda: RandomSubsetTrainingSampler(SIZE, 0.7),
    }[name]()
    sampler._rank, sampler._world_size = rank, ranks
    return sampler


def loader_of(sampler="TrainingSampler", rank=0, ranks=1, batch=3, **options):
    options = {"num_workers": 0, "aspect_ratio_grouping": False, **options}
    sampler = sampler_of(sampler, rank, ranks)
    return build_detection_train_loader(
        DICTS, mapper=Mapper(), sampler=sampler, total_batch_size=batch, **options
    )


OPTIONS = [  # workers and the other samplers together add no code to that of each
    *(
        {"sampler": sampler, "aspect_ratio_grouping": grouped}
        for sampler in ("RepeatFactorTrainingSampler", "RandomSubsetTrainingSampler")
        for grouped in (False, True)
    ),
    *(
        {"num_workers": workers, "aspect_ratio_grouping": grouped}
        for workers in (0, 2)
        for grouped in (False, True)
    ),
    {"num_workers": 2, "collate_fn": first_of},
    {"aspect_ratio_grouping": True, "collate_fn": first_of},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_batches_are_those_of_the_loader_to_the_last_bit(options):
    seed_all_rng(0)
    expected = list(islice(loader_of(**options), 8)), torch.rand(1)
    seed_all_rng(0)
    assert (list(islice(ResumableBatches(loader_of(**options)), 8)), torch.rand(1)) == expected


@pytest.mark.parametrize("taken", [1, 2, 11])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_resumed_stream_goes_on_to_the_last_bit(options, taken):
    seed_all_rng(0)
    batches = ResumableBatches(loader_of(**options))
    for _ in range(taken):
        next(batches)
    stream, state, own = in_a_checkpoint(batches.stream(), batches.state(), RandomState().states)
    expected = [next(batches) for _ in range(8)]

    seed_all_rng(7)
    resumed = ResumableBatches(loader_of(**options))
    iter(resumed)  # as Detectron2 v0.6 does before a checkpoint is loaded
    resumed.load_state_dict(stream, [state])
    RandomState(states=own).restore()
    assert [next(resumed) for _ in range(8)] == expected


def in_a_checkpoint(*state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def ids(batches):
    return [image["image_id"] for batch in batches for image in batch]


LAYOUTS = {  # ranks, workers, images of all ranks in a batch
    "no workers": (2, 0, 4),
    "one rank": (1, 2, 2),
    "three ranks": (3, 2, 9),
    "larger batches": (2, 2, 8),
}


def all_ranks(ranks, workers, batch, grouped):
    """Batches of each rank, with the sampler's seed that they share."""
    made = []
    for rank in range(ranks):
        options = {"num_workers": workers, "aspect_ratio_grouping": grouped}
        loader = loader_of(rank=rank, ranks=ranks, batch=batch // ranks, **options)
        (loader.dataset if grouped else loader).dataset.sampler._seed = 5
        as_rank = {"get_rank": lambda n=rank: n, "get_world_size": lambda: ranks}
        with patch.multiple(comm, **as_rank):
            made.append(ResumableBatches(loader))
    return made


@pytest.mark.parametrize("grouped", [False, True], ids=["not grouped", "grouped"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_at_most_a_batch_of_each_worker_is_lost_when_ranks_workers_or_batches_change(
    layout, grouped
):
    ranks = all_ranks(2, 2, 4, grouped)
    seen = [i for batches in ranks for i in ids(next(batches) for _ in range(5))]
    states = in_a_checkpoint(ranks[0].stream(), [b.state() for b in ranks])
    resumed = all_ranks(*LAYOUTS[layout], grouped)
    for batches in resumed:
        batches.load_state_dict(*states)
        assert 0 <= batches.stream()["first"] - len(seen) <= (8 if grouped else 0)
    seen += [i for batches in resumed for i in ids(next(batches) for _ in range(4))]
    sampler = sampler_of("TrainingSampler")
    sampler._seed = 5
    lost = Counter(islice(sampler, len(seen))) - Counter(seen)
    ahead = 2 * sum(
        ranks * max(1, workers) * batch for ranks, workers, batch in [(2, 2, 2), (1, 2, 4)]
    )
    assert lost.total() <= ahead


def test_what_is_not_known_is_named():
    loader = loader_of()
    for unknown, text in (
        ([1, 2], "a list"),
        (iter(loader), "a _SingleProcessDataLoaderIter"),
        (torch.utils.data.DataLoader(DICTS), "a DataLoader"),
    ):
        with pytest.raises(UnknownLoader, match=text):
            ResumableBatches(unknown)
    loader.dataset.sampler = Repeated(SIZE)  # which has all the attributes of known ones
    with pytest.raises(UnknownLoader, match="one with a Repeated"):
        ResumableBatches(loader)
    loader.dataset.sampler = torch.utils.data.SequentialSampler(DICTS)
    with pytest.raises(UnknownLoader, match="one with a SequentialSampler"):
        ResumableBatches(loader)


class Repeated(TrainingSampler):
    def __iter__(self):
        for index in super().__iter__():
            yield from [index] * 3


class Signalled(Mapper):
    """Its worker gets all signals that end a run, as from a terminal or Slurm."""

    def __call__(self, image):
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        return super().__call__(image)


def test_workers_take_no_notice_of_signals_and_a_hung_one_is_killed_at_the_end():
    before = set(multiprocessing.active_children())
    loader = loader_of(num_workers=2)
    loader.dataset.dataset._map_func = Signalled()
    batches = ResumableBatches(loader)
    assert len([next(batches) for _ in range(8)]) == 8
    stopped, _ = set(multiprocessing.active_children()) - before
    os.kill(stopped.pid, signal.SIGSTOP)
    del batches
    assert set(multiprocessing.active_children()) == before
