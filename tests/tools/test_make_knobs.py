# Copyright (c) the d2_memfit developers.
import re

import make_knobs
import pytest


@pytest.mark.slow
def test_the_guide_is_what_the_planner_says():
    text = (make_knobs.DOCS / "KNOBS.md").read_text()
    for knobs in make_knobs.KNOBS.values():
        assert all(f"| {knob.name} " in text for knob in knobs)
    recipe = make_knobs.estimate([])
    (line,) = [line for line in text.splitlines() if line.startswith("| **recipe**")]
    assert [cell.strip() for cell in line.split("|")[2:4]] == make_knobs.gigabytes(recipe, recipe)


def test_the_page_for_those_who_ran_out_of_memory_has_the_guide_s_figures():
    guide = (make_knobs.DOCS / "KNOBS.md").read_text()
    page = (make_knobs.DOCS / "OUT_OF_MEMORY.md").read_text()
    tries = re.findall(r"^\| \d\. .* \| (-\S+) \| (\S.*?) \| ", page, re.MULTILINE)
    assert len(tries) == 8
    for saved, time in tries:
        assert re.search(rf"\({saved}\) .* \| {time} ", guide)
    recipe = re.search(r"\| \*\*recipe\*\* +\| (\S+) ", guide)[1]
    assert f"from {recipe} GB" in page
