# Copyright (c) the d2_memfit developers.
"""Blocks chosen one by one against checkpoints of all blocks, and of none: memory and time,
predicted and measured on the CPU.

The limit is between what the job needs with all blocks recomputed, and with none. The sides train
in turn on the batch of the dry run, with random weights. Times are medians of CPU seconds, which
other programs on the machine disturb less than the clock's. Ratios are those to all blocks.
"""

import argparse
import statistics
import time

import torch
from detectron2.config import LazyConfig
from detectron2.utils.events import EventStorage

from d2_memfit.common.units import GB
from d2_memfit.config import load_cfg
from d2_memfit.job import Job, WorstCase
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimates import DryJob, steps
from d2_memfit.planner.search import Choice, Trials, choice_of, with_blocks

from .common import CONFIG, machine, markdown_table, take_turns

_CHECKPOINT = "ActivationCheckpointing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config-file", default=CONFIG, help="a yacs config, or a LazyConfig (.py)"
    )
    parser.add_argument("--size", type=int, nargs=2, default=[480, 640], help="height, width")
    parser.add_argument("--images", type=int, default=2, help="images in an iteration")
    parser.add_argument("--share", type=float, default=0.5, help="share of what all blocks save")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side")
    parser.add_argument("opts", nargs="*", help="overrides of the config")


def run(args: argparse.Namespace) -> None:
    size = tuple(args.size)
    job = Job.from_any(_config(args), batch=WorstCase(size, 20))
    trials = Trials(job, DeviceModel.load("cpu"), DryJob, False, lambda line: None)
    plain, every = choice_of((), args.images), choice_of([_CHECKPOINT], args.images)
    least, most = (trials.dry_job(c).least_bytes() for c in (every, plain))
    trials.limit_bytes = int(most - args.share * (most - least))
    chosen, _ = with_blocks(trials, plain, [_CHECKPOINT])
    assert chosen is not None  # all blocks fit
    print(f"{args.config_file}, {args.images} images of {size[0]} x {size[1]} pixels.")
    print(f"Limit {trials.limit_bytes / GB:.2f} GB. {machine()}.\n")
    print(trials.settings(chosen), "\n")
    choices = {"none": plain, "all": every, "chosen": chosen}
    sides = {name: ChoiceSide(trials, choice) for name, choice in choices.items()}
    take_turns(sides.values(), args.rounds)
    rows = []
    for name, side in sides.items():
        dry_job = trials.dry_job(side.choice)
        predicted = dry_job.seconds() / trials.dry_job(every).seconds()
        seconds = statistics.median(side.seconds)
        ratio = seconds / statistics.median(sides["all"].seconds)
        gb = f"{dry_job.training_bytes() / GB:.2f}"
        span = f"{min(side.seconds):.2f} to {max(side.seconds):.2f}"
        rows.append([name, gb, f"{predicted:.3f}", f"{seconds:.2f}", span, f"{ratio:.3f}"])
    header = ["blocks", "GB", "predicted ratio of times", "CPU s", "from, to", "measured ratio"]
    print(markdown_table(header, rows))


def _config(args: argparse.Namespace) -> object:
    if not args.config_file.endswith(".py"):
        return load_cfg(args.config_file, ["SOLVER.IMS_PER_BATCH", args.images, *args.opts])
    cfg = LazyConfig.load(args.config_file)
    size = f"dataloader.train.total_batch_size={args.images}"
    return LazyConfig.apply_overrides(cfg, [size, *args.opts])


class ChoiceSide:
    """One side of a comparison: a choice of a plan that trains on the batch of its dry run."""

    def __init__(self, trials: Trials, choice: Choice) -> None:
        self.choice = choice
        self.job = trials.job.with_settings(trials.settings(choice))
        torch.manual_seed(0)
        self.model, self.optimizer = steps.build_with_values(self.job, "cpu")
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0  # all rounds compute the same
        self.batch = self.job.training_batch()
        self.seconds: list[float] = []

    def round(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        start = time.process_time()
        with EventStorage():
            for _ in steps.iterate(
                self.model, self.optimizer, self.job.precision("cpu"), [self.batch]
            ):
                pass
        self.seconds.append(time.process_time() - start)
