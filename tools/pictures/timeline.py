# Copyright (c) the d2_memfit developers.
"""Who has the memory over one iteration, allocation by allocation."""

import csv
import subprocess
import sys
import tempfile
from itertools import accumulate
from pathlib import Path

import matplotlib
from matplotlib import pyplot

from .owners import GROUPS, RECIPE, REST, group_of

IMAGES = 3
_GB = 2**30


def draw(path: Path) -> None:
    rows = timeline()
    first = min(int(row["begin"]) for row in rows if row["phase"] != "setup")
    last = max(int(row[end]) for row in rows for end in ("begin", "end") if row[end]) + 1
    groups = [group for group in GROUPS if group != REST]
    changes = {group: [0.0] * (last - first + 1) for group in groups}
    for row in rows:
        change = changes[group_of(row["owner"])]
        change[max(int(row["begin"]) - first, 0)] += int(row["bytes"]) / _GB
        if row["end"]:
            change[max(int(row["end"]) - first, 0)] -= int(row["bytes"]) / _GB
    matplotlib.use("Agg")
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    stacks = axes.stackplot(
        range(last - first + 1),
        *(list(accumulate(changes[group])) for group in groups),
        labels=groups,
        colors=[GROUPS[group][0] for group in groups],
        step="post",
    )
    for stack, group in zip(stacks, groups):
        stack.set_hatch(GROUPS[group][1])
        stack.set_edgecolor("white")
        stack.set_linewidth(0)
    for phase in ("forward", "backward", "optimizer"):
        begin = min(int(row["begin"]) for row in rows if row["phase"] == phase) - first
        axes.axvline(begin, color="black", linewidth=0.8)
        name = {"optimizer": "step"}.get(phase, phase)
        axes.annotate(f" {name}", (begin, 1), xycoords=("data", "axes fraction"), va="top")
    axes.set_xlim(0, last - first)
    axes.set_xticks([])
    axes.set_xlabel(f"allocations of an iteration of Mask R-CNN R50-FPN, {IMAGES} images at a time")
    axes.set_ylabel("GB of tensors, estimated")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.08)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def timeline() -> list[dict[str, str]]:
    """The rows that `d2-memfit estimate --timeline` writes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "timeline.csv"
        command = ["estimate", "--device", "cuda", "--training-only", "--config-file", RECIPE]
        options = ["--timeline", str(file), "MEMFIT.MICRO_BATCH", str(IMAGES)]
        subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "d2_memfit", *command, *options],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        with file.open() as f:
            return list(csv.DictReader(f))
