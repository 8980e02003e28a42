# Copyright (c) the d2_memfit developers.
"""CPU seconds of commands, imports included, of this revision and of another in turn: medians.

The explained log is made up: a Mask R-CNN of the zoo that ran out of memory on a card of 12 GB.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from pages import markdown_table

from d2_memfit.config.load import load_cfg

ROOT = Path(__file__).resolve().parents[2]
MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"
TRANSFORMERS = (
    *("--project", "d2_transformers:add_transformers_config"),
    *("--trainer", "d2_transformers:Trainer"),
)
COMMANDS = {
    "estimate, Mask R-CNN": ("estimate", "--config-file", MASK, "--device", "cuda"),
    "plan, the same, 6 GB": ("plan", "--config-file", MASK, "--card", "6GB"),
    "plan, the same, 1 GB": ("plan", "--config-file", MASK, "--budget", "1", "--device", "cuda"),
    "plan, Mask2Former, 6 GB": (
        *("plan", "--config-file", "projects/Transformers/configs/mask2former_r50.yaml"),
        *(*TRANSFORMERS, "--card", "6GB"),
    ),
    "plan, Mask R-CNN, jitter and BatchNorm": (
        *("plan", "--config-file", "new_baselines/mask_rcnn_R_50_FPN_100ep_LSJ.py"),
        *("--num-gpus", "8", "--card", "24GB"),
    ),
    "explain": ("explain", "LOG"),
    "--help": ("--help",),
}
ERROR = (
    "RuntimeError: CUDA out of memory. Tried to allocate 1.50 GiB (GPU 0; 12.00 GiB total "
    "capacity; 10.20 GiB already allocated; 0.30 GiB free; 10.90 GiB reserved in total by PyTorch)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--other", type=Path, help="a work tree of another revision")
    parser.add_argument("--only", default="", help="commands whose name contains this text")
    parser.add_argument("--rounds", type=int, default=3)


def run(args: argparse.Namespace) -> None:
    rows = []
    trees = [ROOT, *([args.other.resolve()] if args.other else [])]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.txt")
        cfg = load_cfg(MASK)
        log.write_text(
            f"Running with full config:\n{cfg.dump()}\n iter: 19  max_mem: 9000M\n{ERROR}\n"
        )
        for name, command in COMMANDS.items():
            if args.only not in name:
                continue
            words = [str(log) if word == "LOG" else word for word in command]
            times: list[list[float]] = [[] for _ in trees]
            for _ in range(args.rounds):
                for tree, of_tree in zip(trees, times):
                    of_tree.append(cpu_seconds(tree, words))
            medians = [statistics.median(of_tree) for of_tree in times]
            ratio = f"{medians[0] / medians[1]:.2f}" if args.other else ""
            rows.append([name, *(f"{median:.1f}" for median in medians), ratio])
            print(rows[-1], file=sys.stderr)
    print(markdown_table(["command", "CPU s", *(["other"] if args.other else []), "share"], rows))


def cpu_seconds(tree: Path, words: list[str]) -> float:
    path = os.pathsep.join([str(tree), str(tree / "projects" / "Transformers")])
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
