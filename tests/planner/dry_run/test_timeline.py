# Copyright (c) the d2_memfit developers.
"""Peaks of a timeline."""

import pytest

from d2_memfit.planner.dry_run import Allocate, Allocation, Free, Timeline


@pytest.mark.parametrize(
    ("phase", "most"), [("forward", 15), ("backward", 15), ("optimizer", 8), ("evaluation", 0)]
)
def test_a_peak_since_a_phase_began_counts_what_is_still_there(phase, most):
    image, loss, step = (
        Allocation(num_bytes, "owner", name)
        for num_bytes, name in ((10, "forward"), (5, "backward"), (3, "optimizer"))
    )
    events = [Allocate(image), Allocate(loss), Free(image), Allocate(step), Free(step)]
    assert Timeline(events).peak_since(phase) == most


def test_the_peak_has_all_that_is_alive_by_owner():
    a, b, c = (Allocation(size, owner, "forward") for size, owner in ((9, "a"), (5, "b"), (7, "a")))
    events = [Allocate(a), Free(a), Allocate(b), Allocate(c), Free(b), Free(c)]
    assert Timeline(events).peak() == {"a": 7, "b": 5}
