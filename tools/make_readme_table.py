#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Write README's table of jobs on three cards, from what `d2-memfit plan --json` says of each.

    tools/make_readme_table.py

Fifteen minutes on one core. The job of the transformers library needs that library.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pages import write_section
from tabulate import tabulate

from d2_memfit.config.cards import find_card

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TRANSFORMERS = ROOT / "projects" / "Transformers"

OF_TRANSFORMERS = (
    *("--trainer", "d2_transformers:Trainer"),
    *("--project", "d2_transformers:add_transformers_config"),
)
CARDS = ("GTX 1060", "RTX 3060", "RTX 4090")  # of 2016, 2021 and 2022
# Names, and arguments of the command.
JOBS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Faster R-CNN R50-FPN", ("COCO-Detection/faster_rcnn_R_50_FPN_3x",)),
    ("Mask R-CNN R50-FPN", ("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x",)),
    ("Panoptic FPN R101", ("COCO-PanopticSegmentation/panoptic_fpn_R_101_3x",)),
    ("Mask R-CNN X101-FPN", ("COCO-InstanceSegmentation/mask_rcnn_X_101_32x8d_FPN_3x",)),
    (
        "Mask2Former R50",
        (str(TRANSFORMERS / "configs" / "mask2former_r50.yaml"), *OF_TRANSFORMERS),
    ),
)


def planned(card: str, config: str, *options: str) -> dict[str, Any]:
    """The result of ``d2-memfit plan --json`` for a job on a card."""
    command = ["plan", "--json", "--card", card, "--config-file", config]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "d2_memfit", *command, *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TRANSFORMERS)])},
        stdout=subprocess.PIPE,
        check=True,
    )
    return dict(json.loads(result.stdout))


def row(name: str, plans: Sequence[dict[str, Any]]) -> list[str]:
    before = plans[0]["before"]
    images, steps = before["images_per_gpu"], before["accumulation_steps"]
    return [
        f"{name}, {images} images" if steps == 1 else f"{name}, {images} x {steps} images",
        *map(cell, plans),
    ]


def cell(plan: dict[str, Any]) -> str:
    """GB of the device without the plan and with it, and the operations of an iteration."""
    before, after = (plan[name]["device_total_gb"] for name in ("before", "estimate"))
    if not plan["steps"]:
        return f"{before:.1f} GB as it is"
    factor = plan["time_factor"]
    time = "" if factor is None else f", x {factor:.2f}"
    return f"{before:.1f} to {after:.1f} GB{time}"


def header() -> list[str]:
    named = (find_card(card) for card in CARDS)
    return ["job", *(f"{c.name}, {c.memory_gb:g} GB" for c in named if c is not None)]


def main() -> None:
    rows = [row(name, [planned(card, *job) for card in CARDS]) for name, job in JOBS]
    table = tabulate(rows, header(), tablefmt="pipe", disable_numparse=True)
    write_section(README, "jobs", "make_readme_table.py", table)


if __name__ == "__main__":
    main()
