# Copyright (c) the d2_memfit developers.
"""Images with up to thousands of objects: memory, time and results, plain and with the techniques.

step        one step by the number of objects: peak, seconds, losses and gradients of both sides
training    iterations on crowded photographs under a limit that the kernel enforces

A step: each model and each number of objects has its own process, in which both sides take turns.
Peaks are counted byte by byte over all tensors, without predictions and annotations. Times are the
process's CPU time, as medians. A side that does not fit in the free memory has no figures.

Training: each side has its own process. Its images are made of a photograph's objects, many times
over. First, Detectron2's trainer trains with enough memory. The limit is what it had at its start
and three quarters of what it took since. Under the limit, it trains again, and so does d2_memfit's
with recovery, without and with the techniques. Time does not include the first iteration. Peaks are
of the process's private memory, read every 2 ms. Weights are compared with those of the first run.

Writes lines to docs/crowds.jsonl. From these, it writes a table of docs/TECHNIQUES.md, and prints
it and one of trainings. Lines of another --label stay. So another version of d2_memfit, on
PYTHONPATH, can be a second row of the tables. --report measures nothing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import step, training
from .images import make_crowds
from .report import DOCS, write

PARTS = ("step", "training")
IMAGE_SIZE = 640  # of crowded photographs, before they are resized for a model
MODELS = (*step.JOBS, *training.JOBS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, metavar="NAME", help="as in the tables"
    )
    parser.add_argument("--objects", type=int, nargs="+", help="of an image; one image for each")
    parser.add_argument("--size", type=int, help="of images and masks, in place of the models'")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side")
    parser.add_argument("--projects", type=Path, metavar="FOLDER", help="with public checkouts")
    parser.add_argument(
        "--images",
        type=Path,
        nargs=2,
        metavar=("JSON", "FOLDER"),
        help="photographs of training, in COCO's format, in place of coins",
    )
    parser.add_argument("--memory-gb", type=float, help="limit of a process, if not what is free")
    parser.add_argument("--label", default="d2_memfit", help="name of this version in the tables")
    parser.add_argument("--report", action="store_true", help="only write the tables")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder for the files")


def run(args: argparse.Namespace) -> None:
    if not args.report:
        for part in args.only:
            for line in steps(args) if part == "step" else trainings(args):
                keep(args.docs, {"part": part, "label": args.label, **line})
    print(write(args.docs))


def steps(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    trees = args.projects
    there = [n for n in step.JOBS if n in step.OF_LIBRARY or (trees and (trees / n).is_dir())]
    for name in there:
        for num_objects in args.objects or step.OBJECTS:
            if name in (args.models or [name]):
                spec = {
                    "name": name,
                    "num_objects": num_objects,
                    "rounds": args.rounds,
                    "size": args.size,
                    "projects": trees and str(trees.resolve()),
                    "memory_gb": args.memory_gb,
                }
                yield in_process("step", spec)


def trainings(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    counts = args.objects or training.COUNTS
    with tempfile.TemporaryDirectory() as folder:
        make_crowds(Path(folder), counts, IMAGE_SIZE, args.images)
        for name in training.JOBS:
            if name in (args.models or [name]):
                yield from sides_of(name, folder, len(counts), args)


def sides_of(
    name: str, folder: str, iterations: int, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Train all sides of a model, and compare their weights."""
    budget_gb = None  # that of the first side
    with tempfile.TemporaryDirectory() as output_dir:
        for side in training.SIDES:
            spec = {
                "name": name,
                "side": side,
                "folder": folder,
                "output_dir": output_dir,
                "iterations": iterations,
                "budget_gb": budget_gb,
                "size": args.size,
            }
            line = {"side": side, **in_process("training", spec)}
            grown_gb = line["peak_gb"] - line["start_gb"]
            budget_gb = budget_gb or line["start_gb"] + training.ROOM * grown_gb
            is_complete = line["iterations"] == iterations
            gap = training.difference(Path(output_dir), side) if is_complete else None
            yield {**line, "difference": gap}


def in_process(module: str, spec: dict[str, Any]) -> Any:
    """What a module of this package measures in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "line.json"
        command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.crowds.{module}"]
        tools = Path(__file__).resolve().parents[2]
        subprocess.run([*command, str(file), json.dumps(spec)], cwd=tools, check=True)
        return json.loads(file.read_text())


def keep(docs: Path, line: dict[str, Any]) -> None:
    """Write a line in place of an earlier one about the same."""
    file = docs / "crowds.jsonl"
    lines = [json.loads(x) for x in file.read_text().splitlines()] if file.exists() else []
    names = ("part", "label", "model", "objects", "side")
    lines = [x for x in lines if any(x.get(name) != line.get(name) for name in names)]
    file.write_text("".join(json.dumps(x) + "\n" for x in [*lines, line]))
