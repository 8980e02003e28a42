# Copyright (c) the d2_memfit developers.
"""Time and RAM of dry runs for the configs of Detectron2's zoo.

A training step has two images of 800 x 1333 pixels with 100 objects each, on this CPU. The first
step of a process finds the labels of the anchors, and later steps reuse them. Each config runs in
its own process.
"""

import argparse
import multiprocessing
import statistics
import time

from d2_memfit.common.units import GB
from d2_memfit.common.zoo import detectron2_zoo
from d2_memfit.config import load_cfg
from d2_memfit.job import Job, WorstCase
from d2_memfit.memory import process_memory
from d2_memfit.planner.estimates import steps

from .common import machine, markdown_table

CASE = WorstCase((800, 1333), 100)
FOLDERS = (
    *("COCO-Detection", "COCO-InstanceSegmentation", "COCO-Keypoints"),
    *(
        "COCO-PanopticSegmentation",
        "LVISv1-InstanceSegmentation",
        "Cityscapes",
        "PascalVOC-Detection",
    ),
    "Misc",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--configs", nargs="+", help="configs of Detectron2's zoo (default: all)")
    parser.add_argument("--steps", type=int, default=3, help="steps to take the median of")


def run(args: argparse.Namespace) -> None:
    rows = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for config in args.configs or all_configs():
            rows.append([config, *pool.apply(measure, (config, args.steps))])
    print(f"{machine()}\n")
    header = ["config", "first step, s", "step, s", "peak of it, GB", "RAM taken, GB"]
    print(markdown_table(header, rows))


def all_configs() -> list[str]:
    root = detectron2_zoo()
    files = [file for folder in FOLDERS for file in sorted((root / folder).glob("*.yaml"))]
    names = [str(file.relative_to(root)) for file in files]
    return [n for n in names if "Base" not in n]


def measure(config: str, num_steps: int) -> list[str]:
    cfg = load_cfg(config)
    seconds = []
    for _ in range(1 + num_steps):
        start = time.perf_counter()
        job = Job.from_cfg(cfg, 1, batch=CASE)
        timeline = steps.train(job, [job.training_batch(2)])
        seconds.append(time.perf_counter() - start)
    resident = process_memory().peak_resident_bytes
    peak = sum(timeline.peak().values())
    first = seconds[0]
    step = statistics.median(seconds[1:])
    return [f"{first:.2f}", f"{step:.2f}", f"{peak / GB:.2f}", f"{resident / GB:.2f}"]
