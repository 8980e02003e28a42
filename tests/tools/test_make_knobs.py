# Copyright (c) the d2_memfit developers.
import make_knobs


def test_the_guide_is_what_the_planner_says():
    text = (make_knobs.DOCS / "KNOBS.md").read_text()
    for knobs in make_knobs.KNOBS.values():
        assert all(f"| {knob.name} " in text for knob in knobs)
    recipe = make_knobs.estimate([])
    (line,) = [line for line in text.splitlines() if line.startswith("| **recipe**")]
    assert [cell.strip() for cell in line.split("|")[2:4]] == make_knobs.gigabytes(recipe, recipe)
