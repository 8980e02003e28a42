# Copyright (c) the d2_memfit developers.
"""The tables of the page: what the doctor found in each project, and its job."""

from collections.abc import Mapping
from textwrap import shorten
from typing import Any

from pages import markdown_table, with_section

from d2_memfit.engine.loss_report import HELP

from .project import PROJECTS

__all__ = ["COLUMNS", "page"]

COLUMNS = ("iteration 0", "accumulation", "recovery", "resume", "two ranks", "plan")
_REPEATED = f" of the gradient off in micro-batches. See {HELP}"
_LONGEST = 110  # characters in a cell


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
    return with_section(text, "results", "compatibility.py", table)


def _cell(findings: Mapping[str, Mapping[str, Any]], column: str) -> str:
    """What is not well, else ``y`` or what was found. Findings begin with their column's name."""
    found = [f for what, f in findings.items() if what.partition(",")[0] == column]
    if not found:
        return findings.get("end", {"text": "its step is not `model(batch)`"})["text"]
    text = "; ".join(f["text"] for f in found if not f["is_well"]).replace(_REPEATED, "")
    if not text and column == "accumulation":
        _, words, losses = found[0]["text"].partition("not checked: ")
        text = f"exact; {words}{losses}" if words else "exact"
    if not text and column == "plan":
        text = found[0]["text"]
    return shorten(text.replace("|", "/"), _LONGEST, placeholder=" ...") or "y"
