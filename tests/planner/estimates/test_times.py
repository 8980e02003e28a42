# Copyright (c) the d2_memfit developers.
"""Ranges of predicted times."""

import pytest

from d2_memfit.planner.estimates import factor_range, in_words
from d2_memfit.planner.estimates.times import seconds_range


def test_what_changes_nothing_has_no_range():
    assert factor_range(1.0) == (1.0, 1.0)
    assert in_words((1.0, 1.0)) == "1.00"
    assert in_words((0.752, 0.949)) == "0.75 to 0.95"


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.3])
def test_larger_changes_and_other_number_formats_have_wider_ranges(factor):
    low, high = factor_range(factor)
    assert low < factor < high
    assert (low < 1) == (high < 1) == (factor < 1)  # it is known which one is faster
    wider = factor_range(factor, changes_number_format=True)
    assert wider[0] < low < high < wider[1]
    assert factor_range(factor**2)[1] / factor**2 > high / factor


def test_the_range_of_a_time_is_a_share_of_it():
    low, high = seconds_range(2.0)
    assert low < 2.0 < high
    assert seconds_range(4.0) == (2 * low, 2 * high)
