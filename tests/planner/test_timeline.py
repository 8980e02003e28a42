# Copyright (c) the d2_memfit developers.
"""Peaks of a timeline."""

from tiny import owners_at_peak

from d2_memfit.planner.timeline import Allocate, Allocation, Free, Timeline, Workspace


def test_the_peak_has_all_that_is_alive_by_owner():
    a, b, c = (Allocation(size, owner, "forward") for size, owner in ((9, "a"), (5, "b"), (7, "a")))
    events = [Allocate(a), Free(a), Allocate(b), Allocate(c), Free(b), Free(c)]
    assert owners_at_peak(Timeline(events)) == {"a": 7, "b": 5}
    assert Timeline([Allocate(a), Workspace(1, "forward", 5)]).more_with_other_algorithms() == 4
