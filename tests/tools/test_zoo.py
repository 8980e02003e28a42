# Copyright (c) the d2_memfit developers.
"""Estimates against published memory, as docs/HOW_ACCURATE.md lists them."""

import pytest
from benchmarks import zoo
from tiny import ROOT

from d2_memfit.planner.device import SHARE_OF_SOFTWARE

PAGE = ROOT / "docs" / "HOW_ACCURATE.md"


def listed(header=zoo.HEADER):
    """Cells of the page's rows, by config and options."""
    lines = PAGE.read_text().splitlines()
    start = lines.index("| " + " | ".join(header) + " |") + 2
    rows = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            return rows
        name, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        rows[name] = dict(zip(header[1:], cells))
    raise AssertionError("the page has no table of rows")


def test_every_published_row_is_listed_with_what_it_was_used_for():
    rows = listed()
    published = [*zoo.zoo_rows(), *zoo.project_rows()]
    assert len(published) == len(rows)
    for row in published:
        cells = rows[f"{row.config} {row.options}".strip()]
        assert cells["used for"] == (row.used or "nothing")
        assert float(cells["published GB"]) == row.gb


def test_ranges_are_those_of_the_package():
    for name, cells in listed().items():
        typical, worst = float(cells["typical"]), float(cells["worst"])
        low, high = map(float, cells["range"].split(" to "))
        software = SHARE_OF_SOFTWARE * worst
        assert low == pytest.approx(min(typical, worst) - software, abs=0.02), name
        assert high >= worst + software - 0.02, name
        is_inside = low <= float(cells["published GB"]) <= high
        assert is_inside == (cells["inside"] == "yes"), name


@pytest.mark.parametrize("is_used", [True, False])
def test_nine_of_ten_rows_are_in_their_range(is_used):
    rows = [cells for cells in listed().values() if (cells["used for"] != "nothing") == is_used]
    inside = sum(cells["inside"] == "yes" for cells in rows)
    assert len(rows) > 30
    assert inside / len(rows) >= 0.9
    assert f"| {inside} of {len(rows)} rows ({inside / len(rows):.0%}) |" in PAGE.read_text()


def test_nine_of_ten_rows_need_no_more_than_the_worst_case_and_the_margin():
    """The share for other software alone; the context is not in published figures."""
    header = [name for name in zoo.HEADER if name != "used for"]
    rows = [row for row in listed().values() if row["used for"] == "nothing"]
    rows += listed(header).values()
    fits = [
        float(row["published GB"]) <= (1 + SHARE_OF_SOFTWARE) * float(row["worst"]) for row in rows
    ]
    assert len(fits) == 60
    assert sum(fits) / len(fits) >= 0.9


def test_rows_listed_beforehand_are_all_there_and_in_no_other_list():
    header = [name for name in zoo.HEADER if name != "used for"]
    rows, unseen = listed(header), zoo.published_memory(zoo.UNSEEN)
    assert {name: float(cells["published GB"]) for name, cells in rows.items()} == unseen
    assert len(unseen) == 20
    assert not unseen.keys() & zoo.published_memory().keys()
    inside = sum(cells["inside"] == "yes" for cells in rows.values())
    assert f"| {inside} of 20 ({inside / 20:.0%}) |" in PAGE.read_text()
