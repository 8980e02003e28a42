# Copyright (c) the d2_memfit developers.
"""The table of docs/OUT_OF_MEMORY.md that `benchmark.py guide` writes."""

from benchmarks import guide
from pages import section


def test_the_page_for_those_who_ran_out_of_memory_has_what_the_planner_says():
    lines = section(guide.PAGE, "tries", guide.TOOL).splitlines()
    assert [line.partition(".")[0] for line in lines if line[2:3].isdigit()] == [
        f"| {number}" for number in range(1, len(guide.TRIES) + 1)
    ]
    assert {*guide.tries(range(2, 6, 3)).splitlines()} <= {*lines}
