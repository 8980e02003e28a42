# Copyright (c) the d2_memfit developers.
"""The compatibility table. The projects themselves are not here: their trees are the user's."""

from compatibility_checks.project import PROJECTS
from compatibility_checks.table import COLUMNS, page
from tiny import ROOT

PAGE = (ROOT / "docs" / "COMPATIBILITY.md").read_text()


def rows_of(text, region):
    after = text.partition(f"<!-- {region}: ")[2].partition(f"<!-- end of {region} -->")[0]
    return [line for line in after.splitlines() if line.startswith("| ")][2:]


def test_the_page_has_a_row_and_the_facts_of_each_project():
    well = {what: {"what": what, "is_well": True, "text": "fine"} for what in COLUMNS}
    results = {name: {"commit": "0" * 40, "findings": well} for name in PROJECTS}
    made = page(PAGE, results, "Made with these.")
    rows = rows_of(made, "results")
    assert len(rows) == len(PROJECTS)
    cells = {tuple(row.strip("| ").split(" | ")[2:]) for row in rows}
    assert cells == {("y", "exact", "y", "y", "y", "fine")}
    assert "24 training jobs. Made with these." in made


def test_the_committed_page_is_of_these_projects():
    assert [row.split(" | ")[0].strip("| ") for row in rows_of(PAGE, "results")] == [*PROJECTS]
