# Copyright (c) the d2_memfit developers.
"""CPU seconds of commands, imports included, of this revision and of another in turn: medians."""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from pages import markdown_table

ROOT = Path(__file__).resolve().parents[2]
MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"
TRANSFORMERS = (
    *("--project", "d2_transformers:add_transformers_config"),
    *("--trainer", "d2_transformers:Trainer"),
)
COMMANDS = {
    "estimate, Mask R-CNN": f"estimate --config-file {MASK} --device cuda",
    "plan, the same, 6 GB": f"plan --config-file {MASK} --card 6GB",
    "plan, the same, 1 GB": f"plan --config-file {MASK} --budget 1 --device cuda",
    "plan, Mask2Former, 6 GB": (
        "plan --config-file projects/Transformers/configs/mask2former_r50.yaml --card 6GB "
        "--project d2_transformers:add_transformers_config --trainer d2_transformers:Trainer"
    ),
    "plan, Mask R-CNN, LSJ, 6 GB": (
        "plan --config-file new_baselines/mask_rcnn_R_50_FPN_100ep_LSJ.py --card 6GB"
    ),
    "--help": "--help",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--other", type=Path, help="a work tree of another revision")
    parser.add_argument("--log", help="a log for the command explain")
    parser.add_argument("--rounds", type=int, default=3)


def run(args: argparse.Namespace) -> None:
    trees = [ROOT, *([args.other.resolve()] if args.other else [])]
    rows = []
    explain = {"explain": f"explain {args.log}"} if args.log else {}
    for name, command in {**COMMANDS, **explain}.items():
        rounds = [
            [cpu_seconds(tree, command.split()) for tree in trees] for _ in range(args.rounds)
        ]
        medians = [statistics.median(of_tree) for of_tree in zip(*rounds)]
        share = f"{medians[0] / medians[-1]:.2f}"
        rows.append([name, f"{medians[0]:.1f}", f"{medians[-1]:.1f}", share])
        print(rows[-1], file=sys.stderr)
    print(markdown_table(["command", "CPU s", "other", "share"], rows))


def cpu_seconds(tree: Path, words: list[str]) -> float:
    path = os.pathsep.join(
        [str(tree), str(tree / "projects" / "Transformers"), os.getenv("PYTHONPATH", "")]
    )
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "d2_memfit", *words],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HOME": tempfile.mkdtemp()},
        capture_output=True,
        check=False,
    )
    if done.returncode not in (0, 3):
        raise SystemExit(done.stderr.decode())
    after = os.times()
    return sum(getattr(after, k) - getattr(before, k) for k in ("children_user", "children_system"))
