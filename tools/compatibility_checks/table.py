# Copyright (c) the d2_memfit developers.
"""The tables of the page: what the doctor found in each project, and its job."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .project import PROJECTS, Project

__all__ = ["COLUMNS", "page"]

# Lines of the doctor that each column shows. The page says what they compare.
COLUMNS = {
    "iteration 0": ["iteration 0", "trainer"],
    "accumulation": ["accumulation"],
    "recovery": [
        "recovery, memory runs out in the forward",
        "recovery, memory runs out in the backward",
        "recovery, memory runs out in evaluation",
        "state that a retry puts back",
    ],
    "resume": ["resume"],
    "two ranks": ["two ranks"],
    "estimate": ["estimate"],
    "plan": ["plan"],
}
# Columns that show a figure of a line.
_FIGURES = {
    "accumulation": r"one forward over them are (.*?)\. The largest distance",
    "estimate": r"\(([-+.\d]+%)\)",
    "plan": r"(.*)",
}
# Lines that are shorter in a cell.
_REASONS = {
    r"Its loader is an? (\S+),": "no, the order of its own {} is not known",
    r"^MEMFIT.OOM.POLICY split: .* because (.*?) communicates": (
        "y with `raise`; not with `split`, because {} communicates in each forward"
    ),
}
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
    table = _table(["project", "version", *COLUMNS], *rows)
    text = _with(text, "results", f"{len(rows)} training jobs. {versions}\n\n{table}")
    jobs = [[name, f"[{p.tree}]({p.url})", *_job(p)] for name, p in PROJECTS.items()]
    return _with(text, "jobs", _table(["job", "project", "config file", "class"], *jobs))


def _job(project: Project) -> list[str]:
    module, _, trainer = project.trainer.partition(":")
    folder = "" if project.paths[0] == "." else f"{project.paths[0]}/"
    how = {
        "trainer": f"`{trainer}` in `{folder}{module}.py`",
        "loop": "none: [its own loop](#projects-with-their-own-loop)",
        "lazy": "none: [a LazyConfig](#detrex)",
    }[project.kind]
    if project.memfit_trainer:
        how += ": [two models](#unbiased-teacher)"
    return [f"`{project.config_file}`", how]


def _with(text: str, name: str, content: str) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def _table(*rows: Sequence[str]) -> str:
    header, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *others))


def _cell(findings: Mapping[str, Mapping[str, Any]], column: str) -> str:
    found = [findings[name] for name in COLUMNS[column] if name in findings]
    if not found:
        return findings.get("end", {"text": "its step is not `model(batch)`"})["text"]
    wrong = [f["text"] for f in found if not f["is_well"]]
    text = wrong[0] if wrong else found[0]["text"]
    for pattern, cell in _REASONS.items():
        reason = re.search(pattern, text, re.DOTALL)
        if wrong and reason:
            return cell.format(reason[1])
    figure = re.search(_FIGURES.get(column, "^$"), text, re.DOTALL)
    if figure and column == "accumulation":  # its words say whether it is well
        others, exact, _ = figure[1].partition("exact: ")
        return f"{others}exact: the others" if others and exact else others or "exact"
    if figure and not wrong:
        return f"y: {figure[1]}"
    return "y" if not wrong else text.replace("|", "/")[:_LONGEST]
