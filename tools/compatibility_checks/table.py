# Copyright (c) the d2_memfit developers.
"""The page: what the doctor found in each project, and the lines that each one takes."""

import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from .project import Project

__all__ = ["COLUMNS", "page"]

# Of each column: the doctor's lines, and what is compared.
COLUMNS = {
    "iteration 0": (
        ["iteration 0", "trainer"],
        "loss and gradients of an iteration with those of Detectron2's `SimpleTrainer`, and the "
        "weights of a run with default keys with those of the project's own trainer, to the last "
        "bit",
    ),
    "accumulation": (
        ["accumulation"],
        "the losses of five images one by one, with 10, 3, 1, 0 and 5 objects, with those of one "
        "forward over all. The cell has the loss that is furthest away, and its distance with "
        "`MEMFIT.NORMALIZERS.POLICY off`, `window` (the default) and `exact`; or what the model's "
        "batch normalisation alone makes of it, which has a micro-batch's statistics",
    ),
    "recovery": (
        [
            "recovery, memory runs out in the forward",
            "recovery, memory runs out in the backward",
            "recovery, memory runs out in evaluation",
            "state that a retry puts back",
        ],
        "weights after out-of-memory errors in the forward and in the backward with those of the "
        "same images one by one, to the last bit. An error in evaluation is recovered from, too",
    ),
    "resume": (
        ["resume"],
        "the weights of a run with the project's own loader and trainer, which was ended and "
        "resumed, with those of one that was not, to the last bit",
    ),
    "two ranks": (
        ["two ranks"],
        "weights on one rank with those on the other, to the last bit: with "
        "`MEMFIT.OOM.POLICY raise`, with `split`, and with `split` after an error on one",
    ),
    "estimate": (
        ["estimate"],
        "the bytes of a dry run with those of a training step of real images, with proposals that "
        "the model computes. Above 0, the estimate is larger",
    ),
    "plan": (
        ["plan"],
        "the memory of the project's own recipe for two images on a card, with that of a plan for "
        "30% less",
    ),
}

_HEAD = """\
# Compatibility

This page shows which parts of d2_memfit work with {num} training jobs of public projects, and the
lines that each one needs. All ran on a CPU. To repeat it, put the projects' trees into one folder:

```bash
python tools/compatibility.py --projects FOLDER --output docs/COMPATIBILITY.md
```

{versions}

The cells are what `d2-memfit doctor` found ([DOCTOR.md](DOCTOR.md)). `y` means that the check
passed. Otherwise the cell says what was found. The table below the results
[describes the checks](#checks).

"""

_CHECKS = """
## Checks

Each job has small images, random weights and a dataset of drawn ellipses. In "accumulation",
distances are relative, and [ACCUMULATION.md](ACCUMULATION.md#what-losses-are-divided-by) explains
those above 1e-3. In "estimate", random weights find few objects: heads that only objects reach have
less to do than in the worst case, for which the estimate is.

{compared}"""

_LONGEST = 200  # characters in a cell

_TRAINER = """\
[{tree}]({url}), `{config}`. Add to its `{script}`:

```python
from d2_memfit import MemfitMixin, fit_config


class MemfitTrainer(MemfitMixin, {trainer}):
    pass


trainer = MemfitTrainer(fit_config(cfg, trainer={trainer}))
```
"""

_LOOP = """\
[{tree}]({url}), `{config}`. It has its own training loop: [OWN_LOOP.md](OWN_LOOP.md).
A class with the code before the loop describes the job:

```python
{source}```

The loop then calls the trainer:

```python
trainer = build_trainer(Job.from_trainer({name}, cfg))
for iteration in range(start_iter, max_iter):
    trainer.run_step()
```
"""

_LAZY = """\
[{tree}]({url}), `{config}`. In its `tools/train_net.py`, replace its trainer:

```python
from functools import partial

from d2_memfit import Job
from d2_memfit.engine import build_trainer

clip = partial(torch.nn.utils.clip_grad_norm_, **cfg.train.clip_grad.params)
trainer = build_trainer(Job.from_lazy(cfg), clip_gradients=clip)
```
"""

_SEMI_SUPERVISED = """\
[{tree}]({url}), `{config}`.
Its step has two models: [OWN_LOOP.md](OWN_LOOP.md#semi-supervised-training).

```python
{source}```
"""


def _lines_of(project: Project) -> str:
    facts = {"tree": project.tree, "url": project.url, "config": project.config_file}
    module, _, trainer = project.trainer.partition(":")
    if project.kind == "lazy":
        return _LAZY.format(**facts)
    if project.kind == "loop":
        from . import loops

        source = inspect.getsource(getattr(loops, project.trainer).__mro__[0])
        source = source.partition("    @classmethod\n    def train(")[0].rstrip() + "\n"
        return _LOOP.format(**facts, source=source, name=project.trainer)
    if project.memfit_trainer:
        from . import semi_supervised

        source = inspect.getsource(semi_supervised.make_trainer)
        source = "".join(source.partition("    class Trainer")[1:])
        source = textwrap.dedent(source.rpartition("    return Trainer")[0]).rstrip() + "\n"
        return _SEMI_SUPERVISED.format(**facts, source=source)
    folder = "" if project.paths[0] == "." else f"{project.paths[0]}/"
    return _TRAINER.format(**facts, script=f"{folder}{module}.py", trainer=trainer)


def page(
    projects: Sequence[Project],
    findings: Mapping[str, Mapping[str, Mapping[str, Any]]],
    commits: Mapping[str, str],
    versions: str,
) -> str:
    """The page as Markdown.

    Args:
        findings: findings by project and line of the doctor.
        commits: commit by project.
        versions: one line with the versions used.
    """
    compared = [_row(["check", "what is compared"]), _row(["---", "---"])]
    compared += [_row([column, text]) for column, (_, text) in COLUMNS.items()]
    lines = [_HEAD.format(num=len(projects), versions=versions)]
    lines.append(_row(["project", "version", *COLUMNS]))
    lines.append(_row(["---"] * (len(COLUMNS) + 2)))
    for project in projects:
        cells = [_cell(findings[project.name], column) for column in COLUMNS]
        name = f"[{project.name}](#{_anchor(project.name)})"
        lines.append(_row([name, f"`{commits[project.name][:8]}`", *cells]))
    lines.append(_CHECKS.format(compared="\n".join(compared)))
    for project in projects:
        lines += [f"\n## {project.name}\n", _lines_of(project).rstrip()]
    return "\n".join(lines) + "\n"


def _cell(findings: Mapping[str, Mapping[str, Any]], column: str) -> str:
    found = [findings[name] for name in COLUMNS[column][0] if name in findings]
    if not found:
        return findings.get("end", {"text": "its step is not `model(batch)`"})["text"]
    wrong = [f["text"] for f in found if not f["is_well"]]
    text = wrong[0] if wrong else found[0]["text"]
    measured = {
        "accumulation": r"(?s).*batch normalisation makes (\S+ \S+) from|exact: (\S+ [^;.]+)",
        "estimate": r"\(([-+.\d]+%)\)",
        "plan": r"(.*)",
    }.get(column, "^$")
    figure = re.search(measured, text)
    if figure and figure.lastindex == 1 and column == "accumulation":
        return f"no, by its batch normalisation: {figure[1]}"
    if figure and (column == "accumulation" or not wrong):
        return f"{'no' if wrong else 'y'}: {figure[figure.lastindex or 0]}"
    return "y" if not wrong else text.replace("|", "/")[:_LONGEST]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _anchor(title: str) -> str:
    kept = [c for c in title.lower() if c.isalnum() or c in " -"]
    return "".join(kept).replace(" ", "-")
