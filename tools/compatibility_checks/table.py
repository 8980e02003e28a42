# Copyright (c) the d2_memfit developers.
"""The page: projects x checks, and the lines that each project takes."""

from collections.abc import Mapping, Sequence

from .lines import lines_of
from .project import Project

__all__ = ["page"]

_COMPARED = {
    "trains": "the weights after two iterations, with those of plain Detectron2",
    "same loss at iteration 0": "the loss of the first iteration, with that of plain Detectron2",
    "accumulates": "the weights after a step of two batches, with those of the mean gradient",
    "gradient": "the gradient of images one by one, with 10, 3 and no objects, with that of one "
    "forward over all. The cell is the relative difference, in brackets without "
    "`MEMFIT.NORMALIZERS`",
    "resumes": "the weights of a run that was ended and resumed, with those of one that was not",
    "recovers": "the weights after an out-of-memory error, injected into the forward and into the "
    "backward, with those of the same images in halves",
    "estimate against measured": "the bytes of a dry run, in training and in evaluation, with "
    "those of the same step really computed. `y` is within 0.5%",
    "plan": "the memory of the project's own recipe for two images on a card, with that of a plan "
    "for 30% less. A small iteration is trained with the plan",
    "techniques": "the peak of a training step of that recipe with each technique, with that of "
    "the step without it",
}

_HEAD = """\
# Compatibility

This page shows which parts of d2_memfit work with {num} training jobs of public projects, and the
lines that each one needs. All were trained on a CPU. To repeat it, put the projects' trees into one
folder:

```bash
python tools/compatibility.py --projects FOLDER --output docs/COMPATIBILITY.md
```

{versions}

`y` means that the check passed. Otherwise the cell says what was found. The table below the results
[describes the checks](#checks). For your own project, run `d2-memfit doctor`:
[DOCTOR.md](DOCTOR.md).

"""

_CHECKS = """
## Checks

Each job has two small images, random weights and a dataset of drawn ellipses. Weights are compared
to the last bit. [ACCUMULATION.md](ACCUMULATION.md#what-losses-are-divided-by) explains the larger
differences in the column "gradient".

{compared}"""


def page(
    projects: Sequence[Project],
    cells: Mapping[str, Mapping[str, str]],
    checks: Sequence[str],
    commits: Mapping[str, str],
    versions: str,
) -> str:
    """The page as Markdown.

    Args:
        cells: text by project and check.
        commits: commit by project.
        versions: one line with the versions used.
    """
    compared = [_row(["check", "what is compared"]), _row(["---", "---"])]
    compared += [_row([check, _COMPARED[check]]) for check in checks]
    lines = [_HEAD.format(num=len(projects), versions=versions)]
    lines.append(_row(["project", "version", *checks]))
    lines.append(_row(["---"] * (len(checks) + 2)))
    for project in projects:
        found = [cells[project.name].get(check, "not run") for check in checks]
        name = f"[{project.name}](#{_anchor(project.name)})"
        lines.append(_row([name, f"`{commits[project.name][:8]}`", *found]))
    lines.append(_CHECKS.format(compared="\n".join(compared)))
    for project in projects:
        lines += [f"\n## {project.name}\n", lines_of(project).rstrip()]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _anchor(title: str) -> str:
    kept = [c for c in title.lower() if c.isalnum() or c in " -"]
    return "".join(kept).replace(" ", "-")
