# Copyright (c) the d2_memfit developers.
"""Plans against all subsets of techniques and micro-batch sizes, and the cost of planning.

Time and memory come from the planner's own model. The cost is in dry runs and CPU seconds. The
budgets are shares of what each config needs without a plan. Each plan is made in its own process,
and its CPU seconds include imports.
"""

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations
from typing import Optional

from d2_memfit.common.units import GB
from d2_memfit.config import find_config_file, load_cfg
from d2_memfit.job import Job
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.search import Choice, Plan, Planner, Trials, choice_of

from .common import machine, markdown_table

CONFIGS = (
    "COCO-Detection/faster_rcnn_R_50_FPN_3x",
    "COCO-Detection/retinanet_R_50_FPN_3x",
    "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x",
    "COCO-Keypoints/keypoint_rcnn_R_50_FPN_3x",
    "COCO-PanopticSegmentation/panoptic_fpn_R_101_3x",
    "Misc/cascade_mask_rcnn_R_50_FPN_3x",
)
TECHNIQUES = (
    "MixedPrecision",
    "ActivationCheckpointing",
    "ActivationOffload",
    "ChunkedHeads",
    "ChunkedMatching",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--configs", nargs="+", default=CONFIGS)
    parser.add_argument("--shares", nargs="+", type=float, default=(0.25, 0.4, 0.65))
    parser.add_argument("--techniques", nargs="+", default=TECHNIQUES, help="of the subsets")
    parser.add_argument("--images", type=int, default=8, help="in an iteration")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-cpu-seconds", action="store_true", help="start no processes")


def run(args: argparse.Namespace) -> None:
    rows = []
    for config in args.configs:
        opts = ["SOLVER.IMS_PER_BATCH", args.images]
        job = Job.from_any(load_cfg(find_config_file(config), opts))
        device = DeviceModel.load(args.device)
        needed_gb = Planner(job, device).plan(1000, ["exact"]).before.device_total_gb
        every = Trials(job, device)
        for share in args.shares:
            budget_gb = round(needed_gb * share, 2)
            planner = Planner(job, device)
            plan = planner.plan(budget_gb, ["exact", "precision"], "speed")
            best = fastest_of_all(every, plan.margin, budget_gb, args.techniques)
            seconds = plan.estimate.seconds_per_iteration
            slower = f"{seconds / every.dry_job(best).seconds() - 1:+.1%}" if best else ""
            cpu = "" if args.no_cpu_seconds else cpu_seconds(config, budget_gb, opts, args.device)
            names = " + ".join(plan_names(plan)) if plan.fits else "does not fit"
            row = [config, budget_gb, planner.num_dry_runs, cpu, names, best or "none"]
            rows.append([*row, slower if plan.fits else ""])
            print(markdown_table([""] * len(rows[-1]), rows[-1:]), file=sys.stderr, flush=True)
    header = ["config", "budget, GB", "dry runs", "CPU s", "plan", "best of all", "slower by"]
    print(f"{machine()}\n\n{markdown_table(header, rows)}")


def plan_names(plan: Plan) -> list[str]:
    images = f"{plan.estimate.micro_batch_size} images in a micro-batch"
    return [images, *(s.name for s in plan.steps if s.name != "smaller micro-batches")]


def fastest_of_all(
    trials: Trials, margin: float, budget_gb: float, techniques: Sequence[str]
) -> Optional[Choice]:
    """By dry runs of all subsets, each with its largest micro-batch, which is its fastest.

    A micro-batch is not run dry where the subset's times for one and two images say that it is more
    than 1% slower than the best so far: they tell other times to 0.3%.
    """
    trials.limit_bytes = int(budget_gb * (1 - margin) * GB)
    window = trials.job.geometry.window
    sizes = sorted({-(-window // n) for n in range(1, window + 1)}, reverse=True)
    helpful = [name for name in techniques if trials.helps(name)]
    best, best_seconds = None, math.inf
    for names in (c for n in range(len(helpful) + 1) for c in combinations(helpful, n)):
        if not all(trials.runs(choice_of(names, num_images)) for num_images in (1, 2)):
            continue
        for num_images in sizes:
            if (trials.interpolated_seconds(names, num_images) or 0) > 1.01 * best_seconds:
                break
            choice = choice_of(names, num_images)
            if trials.fits(choice):
                if trials.dry_job(choice).seconds() < best_seconds:
                    best, best_seconds = choice, trials.dry_job(choice).seconds()
                break
    return best


def cpu_seconds(config: str, budget_gb: float, opts: Sequence[object], device: str) -> str:
    command = [sys.executable, "-m", "d2_memfit", "plan", "--config-file", config]
    command += ["--device", device, "--budget", str(budget_gb), *map(str, opts)]
    before = os.times()
    # If no plan fits, it exits with status 3.
    subprocess.run(command, check=False, capture_output=True)
    after = os.times()
    return f"{after.children_user - before.children_user:.1f}"
