# Copyright (c) the d2_memfit developers.
"""The limit of micro-batches: halved, and grown back."""

import pytest

from d2_memfit.engine.retry import Cutter
from d2_memfit.engine.window import MicroBatch


@pytest.fixture
def cutter(monkeypatch):
    def make(configured, grow_after):
        monkeypatch.setattr("d2_memfit.engine.retry.GROW_AFTER", grow_after)
        return Cutter(configured)

    return make


def clean(size, num):
    """So many clean iterations; those after which the size grew."""
    return [i for i in range(1, num + 1) if size.end_iteration(clean=True)]


def halve(size, num_images):
    """The size after a micro-batch of so many images did not fit."""
    size.lower(MicroBatch([{}] * num_images))
    return size.images


def fail(size, num_images):
    halve(size, num_images)
    size.end_iteration(clean=False)


def test_it_is_halved_down_to_one(cutter):
    size = cutter(None, grow_after=10)
    assert size.images is None
    assert [halve(size, n) for n in (8, 4, 2)] == [4, 2, 1]
    assert halve(cutter(7, grow_after=10), 7) == 3


def test_it_grows_back_to_what_is_configured_and_not_beyond(cutter):
    size = cutter(6, grow_after=3)
    fail(size, 6)
    fail(size, 3)
    assert clean(size, 20) == [3]
    assert size.images == 6


def test_its_state_goes_on_where_it_was(cutter):
    size = cutter(8, grow_after=5)
    fail(size, 8)
    clean(size, 2)
    resumed = cutter(8, grow_after=5)
    resumed.load_state_dict(size.state_dict())
    assert clean(resumed, 3) == [3]
    assert resumed.images == 8


def test_a_smaller_size_that_is_configured_since_counts(cutter):
    size = cutter(8, grow_after=5)
    fail(size, 8)
    resumed = cutter(2, grow_after=5)
    resumed.load_state_dict(size.state_dict())
    assert resumed.images == 2
    assert clean(resumed, 20) == []
