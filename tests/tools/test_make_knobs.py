# Copyright (c) the d2_memfit developers.
import re

import make_knobs
import pytest
from pages import section


@pytest.mark.slow
def test_the_guide_is_what_the_planner_says():
    text = section(make_knobs.DOCS / "TECHNIQUES.md", "knobs", "make_knobs.py")
    for knobs in make_knobs.KNOBS.values():
        assert all(f"| {knob.name} " in text for knob in knobs)
    recipe = make_knobs.estimate([])
    (line,) = [line for line in text.splitlines() if line.startswith("| **recipe**")]
    assert [cell.strip() for cell in line.split("|")[2:4]] == make_knobs.gigabytes(recipe, recipe)


def test_the_page_for_those_who_ran_out_of_memory_has_all_rows():
    lines = section(make_knobs.DOCS / "OUT_OF_MEMORY.md", "tries", "make_knobs.py").splitlines()
    rows = [line for line in lines if line[2:3].isdigit()]
    assert len(rows) == len(make_knobs.TRIES) == 8
    for row, (words, opts, more, changes) in zip(rows, make_knobs.TRIES):
        assert f". {words}: `{opts}`{more} |" in row
        assert row.endswith(f" | {changes} |")
    guide = section(make_knobs.DOCS / "TECHNIQUES.md", "knobs", "make_knobs.py")
    recipe = re.search(r"\| \*\*recipe\*\* +\| (\S+) ", guide)[1]
    assert lines[0] == f"Training starts from {recipe} GB."


@pytest.mark.slow
@pytest.mark.parametrize("number", [3, 6])  # their keys are those of no row of TECHNIQUES.md
def test_its_rows_are_what_the_planner_says_of_their_keys(number, monkeypatch):
    monkeypatch.setattr(make_knobs, "TRIES", make_knobs.TRIES[number - 1 : number])
    row = make_knobs.tries(make_knobs.estimate([])).splitlines()[-1]
    text = (make_knobs.DOCS / "OUT_OF_MEMORY.md").read_text()
    assert row.replace("| 1. ", f"| {number}. ") in text
