# Copyright (c) the d2_memfit developers.
"""Predicted times, against published ones that nobody chose settings on."""

import statistics

import pytest
from benchmarks import times

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def held_out():
    """The rows that were kept out of the fit, but those of projects that are not here."""
    rows = times.predicted_rows(use=times.HELD_OUT)
    assert len(rows) == 36
    return rows


def median(errors):
    return statistics.median(map(abs, errors))


def test_times_that_were_not_fitted(held_out):
    errors = [r.predicted / r.seconds - 1 for r in held_out if not r.counts_for_ratio_only]
    assert len(errors) == 30
    assert median(errors) < 0.25
    times_of_runs = [row for row in held_out if not row.counts_for_ratio_only]
    assert sum(r.range[0] <= r.seconds <= r.range[1] for r in times_of_runs) >= 18


def test_what_16_bits_change_in_rows_that_were_not_fitted(held_out):
    ratios = times.format_ratios(held_out)
    assert len(ratios) == 13
    assert median(r.predicted - r.published for r in ratios) < 0.1
    assert sum(map(times.is_inside, ratios)) >= 11


def test_what_larger_micro_batches_change_in_rows_that_were_not_fitted(held_out):
    ratios = times.gains(held_out)
    assert len(ratios) == 6
    assert median(r.predicted - r.published for r in ratios) < 0.05
