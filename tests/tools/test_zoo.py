# Copyright (c) the d2_memfit developers.
"""Estimates against published memory, as docs/accuracy_published.csv lists them."""

import csv

import pytest
from benchmarks import zoo
from tiny import ROOT

from d2_memfit.planner.device import SHARE_OF_SOFTWARE

BEFOREHAND = "nothing, listed beforehand"


@pytest.fixture(scope="module")
def rows():
    with open(ROOT / "docs" / "accuracy_published.csv", newline="") as f:
        return list(csv.DictReader(f))


def test_every_published_row_is_listed_with_what_it_was_used_for(rows):
    listed = {row["config"]: row for row in rows if row["used for"] != BEFOREHAND}
    published = [*zoo.zoo_rows(), *zoo.project_rows()]
    assert len(published) == len(listed)
    for row in published:
        cells = listed[f"{row.config} {row.options}".strip()]
        assert cells["used for"] == (row.used or "nothing")
        assert float(cells["published GB"]) == row.gb
    unseen = {r["config"]: float(r["published GB"]) for r in rows if r["used for"] == BEFOREHAND}
    assert unseen == zoo.published_memory(zoo.UNSEEN)
    assert not unseen.keys() & zoo.published_memory().keys()


def test_what_is_inside_is(rows):
    for row in rows:
        low, high = map(float, row["range"].split(" to "))
        assert (low <= float(row["published GB"]) <= high) == (row["inside"] == "yes"), row


@pytest.mark.parametrize("is_used", [True, False])
def test_nine_of_ten_rows_are_in_their_range(rows, is_used):
    kinds = {"nothing": False, BEFOREHAND: None}
    chosen = [row["inside"] for row in rows if kinds.get(row["used for"], True) == is_used]
    assert len(chosen) > 30
    assert chosen.count("yes") / len(chosen) >= 0.9


def test_nine_of_ten_rows_need_no_more_than_the_worst_case_and_the_margin(rows):
    """The share for other software alone; the context is not in published figures."""
    fits = [
        float(row["published GB"]) <= (1 + SHARE_OF_SOFTWARE) * float(row["worst"])
        for row in rows
        if row["used for"].startswith("nothing")
    ]
    assert len(fits) == 60
    assert sum(fits) / len(fits) >= 0.9
