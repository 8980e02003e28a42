# Copyright (c) the d2_memfit developers.
"""Which setting saves how much: the tables that `benchmark.py techniques` writes."""

import re

import pytest
from benchmarks import guide
from pages import section


@pytest.fixture(scope="module")
def recipe():
    return guide.dry_job(guide.Knob("recipe", ""))


@pytest.mark.slow
def test_the_guide_is_what_the_planner_says(recipe):
    text = section(guide.DOCS / "TECHNIQUES.md", "knobs", guide.TOOL)
    for knobs in guide.KNOBS.values():
        assert all(f"| {knob.name} |" in text for knob in knobs)
    (line,) = [line for line in text.splitlines() if line.startswith("| **recipe**")]
    assert [cell.strip() for cell in line.split("|")[2:4]] == guide.gigabytes(recipe, recipe)


def test_the_page_for_those_who_ran_out_of_memory_has_all_rows():
    lines = section(guide.DOCS / "OUT_OF_MEMORY.md", "tries", guide.TOOL).splitlines()
    rows = [line for line in lines if line[2:3].isdigit()]
    assert len(rows) == len(guide.TRIES) == 8
    for row, knob in zip(rows, guide.TRIES):
        assert f". {knob.name}: `{knob.opts}`{knob.remark} |" in row
        assert row.endswith(f" | {knob.changes} |")
    text = section(guide.DOCS / "TECHNIQUES.md", "knobs", guide.TOOL)
    gb = re.search(r"\| \*\*recipe\*\* \| (\S+) ", text)[1]
    assert lines[0] == f"Training starts from {gb} GB."


@pytest.mark.slow
@pytest.mark.parametrize("number", [3, 6])  # their keys are those of no row of TECHNIQUES.md
def test_its_rows_are_what_the_planner_says_of_their_keys(number, recipe, monkeypatch):
    monkeypatch.setattr(guide, "TRIES", guide.TRIES[number - 1 : number])
    row = guide.tries(recipe).splitlines()[-1]
    text = (guide.DOCS / "OUT_OF_MEMORY.md").read_text()
    assert row.replace("| 1. ", f"| {number}. ") in text
