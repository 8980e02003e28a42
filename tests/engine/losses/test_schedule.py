# Copyright (c) the d2_memfit developers.
"""In which iterations the losses of a run are tested."""

import pytest

from d2_memfit.engine.losses.schedule import Schedule


def iterations_tested(schedule, windows, news=lambda i: ()):
    """Those in which losses are tested, for the objects and places of each window."""
    tested = []
    for i, (objects, may_have_objects) in enumerate(windows):
        if schedule.is_due and schedule.takes(objects, may_have_objects):
            tested.append(i)
            schedule.has_result, schedule.news = True, set()
        schedule.end_iteration(i, news(i))
    return tested


def test_before_the_first_window_and_after_100_and_1000_iterations():
    assert iterations_tested(Schedule(True), [([3, 1], True)] * 1100) == [0, 100, 1000]
    assert iterations_tested(Schedule(False), [([3], True)] * 3, lambda i: [0]) == []


@pytest.mark.parametrize(("may_have_objects", "expected"), [(True, [0, 2]), (False, [0])])
def test_a_window_without_objects_is_tested_if_nothing_is_known_and_the_next_one_too(
    may_have_objects, expected
):
    windows = [([0, 0], may_have_objects)] * 2 + [([0, 2], may_have_objects)] * 3
    assert iterations_tested(Schedule(True), windows) == expected


def test_news_are_tested_eight_times_at_most_in_a_resumed_run_too():
    schedule = Schedule(True)
    assert iterations_tested(schedule, [([1], True)] * 6, lambda i: [0]) == list(range(6))
    resumed = Schedule(True)
    resumed.load_state_dict(schedule.state_dict())
    assert iterations_tested(resumed, [([1], True)] * 6, lambda i: [0]) == [0, 1]
