#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Write README's table of jobs, from what `d2-memfit plan --json` says of each.

    tools/make_readme_table.py

A few minutes on one core. The job of the transformers library needs that library.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tabulate import tabulate

from d2_memfit.planner.estimates import in_words

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
TRANSFORMERS = ROOT / "projects" / "Transformers"
BEGIN = "<!-- jobs: written by tools/make_readme_table.py -->\n"
END = "\n<!-- end of jobs -->"

OF_TRANSFORMERS = (
    *("--trainer", "d2_transformers:Trainer"),
    *("--project", "d2_transformers:add_transformers_config"),
)
# Names, cards, and arguments of the command.
JOBS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Faster R-CNN R50-FPN", "4GB", ("COCO-Detection/faster_rcnn_R_50_FPN_3x",)),
    ("Mask R-CNN R50-FPN", "6GB", ("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x",)),
    ("Panoptic FPN R101", "6GB", ("COCO-PanopticSegmentation/panoptic_fpn_R_101_3x",)),
    ("Mask R-CNN X101-FPN", "8GB", ("COCO-InstanceSegmentation/mask_rcnn_X_101_32x8d_FPN_3x",)),
    (
        "Mask2Former R50",
        "8GB",
        (str(TRANSFORMERS / "configs" / "mask2former_r50.yaml"), *OF_TRANSFORMERS),
    ),
)
HEADER = ["job", "card", "GB, plain", "GB, planned", "time x", "time x, mixed precision"]


def planned(card: str, config: str, *options: str) -> dict[str, Any]:
    """The result of ``d2-memfit plan --json`` for a job."""
    command = ["plan", "--json", "--device", "cuda", "--card", card, "--config-file", config]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "d2_memfit", *command, *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TRANSFORMERS)])},
        stdout=subprocess.PIPE,
        check=True,
    )
    return dict(json.loads(result.stdout))


def row(name: str, card: str, plan: dict[str, Any]) -> list[str]:
    before, after = plan["before"], plan["estimate"]
    images, steps = before["images_per_gpu"], before["accumulation_steps"]
    other = plan["other"]
    return [
        f"{name}, {images} images" if steps == 1 else f"{name}, {images} x {steps} images",
        f"{card[:-2]} GB",
        f"{before['device_total_gb']:.1f}",
        f"{after['device_total_gb']:.1f}",
        in_words(plan["time_range"]),
        in_words(other["time_range"]) if other and not other["is_exact"] else "",
    ]


def main() -> None:
    rows = [row(name, card, planned(card, *arguments)) for name, card, arguments in JOBS]
    table = tabulate(rows, HEADER, tablefmt="pipe", disable_numparse=True)
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


if __name__ == "__main__":
    main()
