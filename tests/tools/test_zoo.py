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


def test_nine_of_ten_rows_are_in_their_range_and_below_the_worst_case_with_the_margin(rows):
    """The share for other software alone; the context is not in published figures."""
    inside, fits = {True: [], False: [], None: []}, []
    for row in rows:
        published = float(row["published GB"])
        low, high = map(float, row["range"].split(" to "))
        assert (low <= published <= high) == (row["inside"] == "yes"), row
        is_used = {"nothing": False, BEFOREHAND: None}.get(row["used for"], True)
        inside[is_used].append(row["inside"] == "yes")
        if row["used for"].startswith("nothing"):
            fits.append(published <= (1 + SHARE_OF_SOFTWARE) * float(row["worst"]))
    for found in (inside[True], inside[False], fits):
        assert len(found) > 30
        assert sum(found) / len(found) >= 0.9
