# Copyright (c) the d2_memfit developers.
"""The tables of the page: what the doctor found in each project, and its job."""

from collections.abc import Mapping
from typing import Any

from pages import markdown_table, with_section

from .project import PROJECTS

__all__ = ["COLUMNS", "page"]

TOOL = "compatibility.py"
COLUMNS = ("iteration 0", "accumulation", "recovery", "resume", "two ranks", "plan")
_WITH_TEXT = ("accumulation", "plan")  # columns that also show what is well
_LONGEST = 200  # characters in a cell


def page(text: str, results: Mapping[str, Mapping[str, Any]], versions: str) -> str:
    """The page with its tables made again.

    Args:
        text: the page as it is.
        results: "commit" and "findings", by line of the doctor, of each project.
        versions: one line with the versions used.
    """
    rows = []
    for name in (name for name in PROJECTS if name in results):
        findings = results[name]["findings"]
        cells = [_cell(findings, column) for column in COLUMNS]
        rows.append([name, f"`{results[name]['commit'][:8]}`", *cells])
    table = markdown_table(["project", "version", *COLUMNS], rows)
    table = f"{len(rows)} training jobs. {versions}\n\n{table}"
    return with_section(text, "results", TOOL, table)


def _cell(findings: Mapping[str, Mapping[str, Any]], column: str) -> str:
    """``y``, or what is not well. A column has the findings that begin with its name."""
    found = [f for what, f in findings.items() if what.partition(",")[0] == column]
    if not found:
        return findings.get("end", {"text": "its step is not `model(batch)`"})["text"]
    wrong = [f["text"] for f in found if not f["is_well"]]
    if not wrong and column not in _WITH_TEXT:
        return "y"
    return (wrong[0] if wrong else f"y: {found[0]['text']}").replace("|", "/")[:_LONGEST]
