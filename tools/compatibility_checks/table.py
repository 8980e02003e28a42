"""The page: projects x checks, and the lines that each project takes."""

from collections.abc import Mapping, Sequence

from .lines import lines_of
from .project import Project

__all__ = ["page"]

_COMPARED = {
    "trains": "the weights after two iterations with plain Detectron2's",
    "same loss at iteration 0": "the loss of the first iteration with plain Detectron2's",
    "accumulates": "the weights after a step of two batches with those of the mean gradient",
    "gradient": "the gradient of images one by one, with 10, 3 and no objects, with that of one "
    "forward over all: relative difference; and the same without `MEMFIT.NORMALIZERS`",
    "resumes": "the weights of a run that was ended and resumed with those of one that was not",
    "recovers": "the weights after an out-of-memory error, injected into the forward and into the "
    "backward, with those of the same images in halves",
    "estimate against measured": "the bytes of a dry run, in training and in evaluation, with "
    "those of the same step really computed; `y` is within 0.5%",
    "plan": "what the project's own recipe needs for two images on a card with what is found for "
    "30% less; a small iteration is trained with it",
    "techniques": "the peak of a training step of that recipe with each technique and without",
}

_HEAD = """\
# Compatibility

{num} public projects were trained on a CPU with d2_memfit. Try it with their trees in one folder:

```bash
python tools/compatibility.py --projects FOLDER --output docs/COMPATIBILITY.md
```

`y` means that the check passed. Else the cell says what was found. Each job has two small images
and random weights, and a dataset of drawn ellipses. Weights are equal to the last bit.

{compared}

{versions}

"""


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
        commits: by project.
        versions: of what the checks ran with; a line.
    """
    compared = [_row(["check", "what is compared"]), _row(["---", "---"])]
    compared += [_row([check, _COMPARED[check]]) for check in checks]
    facts = {"num": len(projects), "compared": "\n".join(compared), "versions": versions}
    lines = [_HEAD.format(**facts)]
    lines.append(_row(["project", "version", *checks]))
    lines.append(_row(["---"] * (len(checks) + 2)))
    for project in projects:
        found = [cells[project.name].get(check, "not run") for check in checks]
        name = f"[{project.name}](#{_anchor(project.name)})"
        lines.append(_row([name, f"`{commits[project.name][:8]}`", *found]))
    for project in projects:
        lines += [f"\n## {project.name}\n", lines_of(project).rstrip()]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _anchor(title: str) -> str:
    kept = [c for c in title.lower() if c.isalnum() or c in " -"]
    return "".join(kept).replace(" ", "-")
