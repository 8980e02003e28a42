# Copyright (c) the d2_memfit developers.
"""The compatibility table. The projects themselves are not here: their trees are the user's."""

import re
import sys

from compatibility_checks.checks import CHECKS
from compatibility_checks.planning import PLANNING
from compatibility_checks.projects import PROJECTS
from compatibility_checks.table import page
from tiny import ROOT, run_process

COLUMNS = [*CHECKS, *PLANNING]
PAGE = (ROOT / "docs" / "COMPATIBILITY.md").read_text()


def test_the_page_has_a_row_and_its_lines_for_each_project():
    cells = {p.name: dict.fromkeys(COLUMNS, "y") for p in PROJECTS}
    made = page(PROJECTS, cells, COLUMNS, dict.fromkeys(cells, "0" * 40), "Made with these.")
    rows = [line for line in made.splitlines() if line.startswith("| [")]
    assert len(rows) == len(PROJECTS)
    assert all(row.count(" y ") == len(COLUMNS) for row in rows)
    for project in PROJECTS:
        assert f"## {project.name}" in made


def test_the_committed_page_is_of_these_projects_and_says_what_is_not_well():
    rows = [line for line in PAGE.splitlines() if line.startswith("| [")]
    assert [re.match(r"\| \[(.*?)\]", row)[1] for row in rows] == [p.name for p in PROJECTS]
    assert not any("not run" in row for row in rows)
    of_lines = PAGE[PAGE.index("\n## ") :]
    cells = {p.name: dict.fromkeys(COLUMNS, "y") for p in PROJECTS}
    made = page(PROJECTS, cells, COLUMNS, dict.fromkeys(cells, "0" * 40), "")
    assert of_lines == made[made.index("\n## ") :], "make the page again"


def test_a_tree_that_is_not_there_is_told(tmp_path):
    tool = ROOT / "tools" / "compatibility.py"
    output = tmp_path / "page.md"
    result = run_process([sys.executable, tool, "--projects", tmp_path, "--output", output])
    assert result.returncode == 0, result.stderr[-2000:]
    assert all(f"{p.name}: no tree {p.tree}" in result.stderr for p in PROJECTS)
    assert output.read_text().startswith("# Compatibility")
