# Copyright (c) the d2_memfit developers.
"""d2_memfit against plain Detectron2, Accelerate, Lightning, mmengine and Composer.

All train Detectron2's Mask R-CNN on photographs of coins, as their own documentation says. The
environment needs requirements/peers.txt, which says how to make one. A side that is not installed
does not race, and is named. Sections:

time        time per image, 8 images per step
memory      peak of memory, with the same images
gradients   the gradient that reaches the optimizer, if a window does not divide evenly
survival    the effect of a batch that does not fit into memory, on one rank and on two
budget      the smallest budget for a step with 16 images of 800 pixels

Each result is written to OUTPUT/results.jsonl at once; the same command continues from there.
--report measures nothing: it writes docs/BENCHMARK.md, docs/benchmark.png and docs/benchmark.jsonl.
"""

import argparse
import importlib
import logging
import platform
import warnings
from pathlib import Path

import psutil
import torch

from ..common import coins, machine
from . import budget, effective_gradients, speed, survival
from .report import TABLES, write_report
from .results import FILE_NAME, Results
from .sides import EVERY, Side

SECTIONS = {
    "time": speed.SIDES,
    "memory": speed.SIDES,
    "gradients": effective_gradients.SIDES,
    "survival": survival.SIDES,
    "budget": budget.SIDES,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [side.name for side in EVERY]
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--sides", nargs="+", choices=names, default=names, metavar="SIDE")
    parser.add_argument("--output", type=Path, default=Path("output/peers"))
    parser.add_argument("--size", type=int, nargs=2, default=[480, 640], help="of time and memory")
    parser.add_argument("--images", type=int, default=8, help="behind a step of time and memory")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each side's time")
    parser.add_argument("--train", type=int, default=60, help="iterations before the gradients")
    parser.add_argument("--ranks", type=int, nargs="+", choices=[1, 2], default=[1, 2])
    parser.add_argument("--guess", type=float, default=2.5, help="first budget to try, GB")
    parser.add_argument("--time-limit", type=float, default=1800, help="s, of a process")
    parser.add_argument("--report", action="store_true", help="write docs/BENCHMARK.md")


def run(args: argparse.Namespace) -> None:
    results = Results(args.output / FILE_NAME)
    if args.report:
        write_report(results)
        return
    args.output.mkdir(parents=True, exist_ok=True)
    logging.getLogger("detectron2").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore")
    note_setting(results, args)
    chosen = [side for side in EVERY if side.name in args.sides]
    for side in chosen:
        if not side.is_installed:
            print(f"{side.name} is not installed, and does not race")

    def sides(section: str) -> list[Side]:
        return [s for s in SECTIONS[section] if s in chosen and s.is_installed]

    if "gradients" in args.only:
        effective_gradients.measure(results, sides("gradients"), args.train)
    if {"time", "memory"} & set(args.only):
        with coins(*args.size) as (dicts, mapper):
            images = [mapper(d) for d in dicts[: args.images]]
        if "memory" in args.only:
            speed.measure_memory(results, sides("memory"), images)
        if "time" in args.only:
            speed.measure_time(results, sides("time"), images, args.rounds)
    if "survival" in args.only:
        for num_ranks in args.ranks:
            survival.measure(results, sides("survival"), num_ranks, args.time_limit)
    if "budget" in args.only:
        budget.measure(results, sides("budget"), args.guess, args.time_limit)
    for section in args.only:
        print(f"\n{section}\n\n{TABLES[section](results)}")


def note_setting(results: Results, args: argparse.Namespace) -> None:
    """Record the setting that the results depend on.

    Raises:
        ValueError: the file's results come from another machine, other versions or settings, or a
            GPU is visible, whose memory the kernel does not limit.
    """
    if torch.cuda.is_available():
        raise ValueError("the race is run on the CPU: set CUDA_VISIBLE_DEVICES=-1")
    packages = {side.package for side in EVERY if side.is_installed}
    versions = {name: importlib.import_module(name).__version__ for name in sorted(packages)}
    settings = {name: vars(args)[name] for name in ("size", "images", "rounds", "train")}
    settings["extra_gb"] = list(survival.EXTRA_GB.values())
    ram_gb = psutil.virtual_memory().total / 2**30
    now = {
        "machine": f"{cpu_model()}, {ram_gb:.0f} GB RAM; {machine()}",
        "versions": versions,
        "settings": settings,
    }
    line = results.find("machine") or results.add("machine", **now)
    before = {key: line[key] for key in now}
    if before != now:
        raise ValueError(
            f"{results.path} was measured on {before}, and this is {now}: name another --output"
        )


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
