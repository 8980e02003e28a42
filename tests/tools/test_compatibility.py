# Copyright (c) the d2_memfit developers.
"""The compatibility table. The projects themselves are not here: their trees are the user's."""

import re
import sys

import pytest
from compatibility_checks.projects import PROJECTS
from compatibility_checks.table import COLUMNS, page
from tiny import ROOT, run_process

PAGE = (ROOT / "docs" / "COMPATIBILITY.md").read_text()
COMMITS = {p.name: "0" * 40 for p in PROJECTS}


def page_of(**of_first):
    """The page if all is well, but for some lines of the doctor in the first project."""
    whats = [what for lines, _ in COLUMNS.values() for what in lines]
    well = {what: {"what": what, "is_well": True, "text": "fine"} for what in whats}
    findings = {p.name: well for p in PROJECTS}
    findings[PROJECTS[0].name] = {**well, **of_first}
    return page(PROJECTS, findings, COMMITS, "Made with these.")


def rows_of(text):
    return [line for line in text.splitlines() if line.startswith("| [")]


def test_the_page_has_a_row_and_its_lines_for_each_project():
    made = page_of()
    rows = rows_of(made)
    assert len(rows) == len(PROJECTS)
    assert all(row.count("| y") == len(COLUMNS) for row in rows)
    for project in PROJECTS:
        assert f"## {project.name}" in made


@pytest.mark.parametrize(
    ("what", "is_well", "text", "cell"),
    [
        (
            "accumulation",
            True,
            "losses of 5 images, with POLICY off, window, exact: loss_a 2e-01, 3e-07, 3e-07; b 0",
            "y: loss_a 2e-01, 3e-07, 3e-07",
        ),
        (
            "accumulation",
            False,
            "losses, with POLICY off, window, exact: loss_a 2e-01, 2e-01, 2e-01. loss_a: divided",
            "no: loss_a 2e-01, 2e-01, 2e-01",
        ),
        (
            "accumulation",
            False,
            "losses, with POLICY off, window, exact: loss_a 2e-01, 3e-07, 3e-07. With the "
            "statistics of each micro-batch, batch normalisation makes loss_b 4e-01 from one's",
            "no, by its batch normalisation: loss_b 4e-01",
        ),
        (
            "estimate",
            True,
            "10.0 MB estimated, 9.5 MB measured with real images (+5.3%)",
            "y: +5.3%",
        ),
        ("plan", True, "4.7 GB in 3.6 by smaller micro-batches", "y: 4.7 GB in 3.6 by smaller"),
        ("resume", False, "3 of 9 tensors differ", "3 of 9 tensors differ"),
        ("two ranks", None, "not tested: the training dataset is not here", "not tested: the"),
    ],
)
def test_a_cell_has_the_figure_or_what_was_found(what, is_well, text, cell):
    row = rows_of(page_of(**{what: {"what": what, "is_well": is_well, "text": text}}))[0]
    assert f"| {cell}" in row


def test_the_committed_page_is_of_these_projects():
    names = [re.match(r"\| \[(.*?)\]", row)[1] for row in rows_of(PAGE)]
    assert names == [p.name for p in PROJECTS]
    made = page(PROJECTS, {n: {} for n in names}, COMMITS, "")
    assert PAGE[PAGE.index("\n## Checks") :] == made[made.index("\n## Checks") :], (
        "make the page again"
    )


def test_a_tree_that_is_not_there_is_told(tmp_path):
    tool = ROOT / "tools" / "compatibility.py"
    output = tmp_path / "page.md"
    result = run_process([sys.executable, tool, "--projects", tmp_path, "--output", output])
    assert result.returncode == 0, result.stderr[-2000:]
    assert all(f"{p.name}: no tree {p.tree}" in result.stderr for p in PROJECTS)
    assert output.read_text().startswith("# Compatibility")
