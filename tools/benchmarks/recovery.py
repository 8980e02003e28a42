# Copyright (c) the d2_memfit developers.
"""The cost of being able to recover from out-of-memory errors, and of a recovery.

The model is Detectron2's Mask R-CNN R50-FPN with random weights. The images are photographs of
coins. All sides take turns in one run; the figures are ratios of medians.

One rank, no error: MEMFIT.OOM.POLICY split against raise, which is Detectron2's behaviour.

One rank, an error at the end of a forward of two images: the time of the iteration, less that of
the lost forward, against the same images as two micro-batches.

The model's state: the time to save it before each micro-batch, also with weights that forwards
change. Here these are all weights, as for a teacher of the same size.

Two ranks, no error: split, which reduces gradients after the backward, against raise, where DDP
reduces them during the backward. Without a GPU, each rank has half of the CPU's threads.
"""

import argparse
import statistics
import time
from collections.abc import Iterable
from functools import partial
from itertools import repeat
from typing import Any

import torch
from detectron2.utils import comm
from pages import markdown_table
from torch import nn

from d2_memfit import AccumulatingTrainer
from d2_memfit.compat import create_ddp_model
from d2_memfit.config.settings import RecoveryOptions
from d2_memfit.engine.launch import launch
from d2_memfit.engine.window import MicroBatch

from .common import Side, coins, machine, take_turns

SPLIT = partial(AccumulatingTrainer, recovery=RecoveryOptions())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, nargs=2, default=[480, 640], help="height, width")
    parser.add_argument("--rounds", type=int, default=11, help="measurements of each side")


def run(args: argparse.Namespace) -> None:
    print(f"Mask R-CNN R50-FPN, {args.size[0]} x {args.size[1]} pixels. {machine()}.\n")
    with coins(*args.size) as (dicts, mapper):
        images = [mapper(d) for d in dicts[:4]]
    print(one_rank(images, args.rounds), "\n")
    if torch.cuda.device_count() != 1:  # two ranks cannot share a GPU
        launch(two_ranks, 2, dist_url="auto", args=(images, args.rounds))


def one_rank(images: list[dict[str, Any]], rounds: int) -> str:
    pairs = repeat(images[:2])
    sides = {
        "raise, 1 image": Side(AccumulatingTrainer, repeat(images[:1])),
        "split, 1 image": Side(SPLIT, repeat(images[:1])),
        "split, 1 + 1 images": Side(partial(SPLIT, micro_batch_size=1), pairs),
        "split, 2 images that fail": Side(FailingTrainer, pairs),
    }
    take_turns(sides.values(), rounds)
    plain, split, halves, failing = sides.values()
    thrown_away = failing.trainer.seconds_thrown_away[-rounds:]
    without = [s - t for s, t in zip(failing.seconds, thrown_away)]
    rows = [
        row("raise, 1 image", plain.seconds, plain.seconds),
        row("split, 1 image", split.seconds, plain.seconds),
        row("split, 1 + 1 images", halves.seconds, halves.seconds),
        row("the same after a failure, less the discarded forward", without, halves.seconds),
    ]
    return markdown_table(["one rank", "s per iteration (median)", "ratio of medians"], rows)


class FailingTrainer(AccumulatingTrainer):
    """A trainer that runs out of memory at the end of each iteration's first forward."""

    def __init__(
        self, model: nn.Module, data_loader: Iterable[Any], optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(model, data_loader, optimizer, recovery=RecoveryOptions())
        self.seconds_thrown_away: list[float] = []

    def run_step(self) -> None:
        self.cutter.forget()
        super().run_step()

    def _forward(self, micro_batch: MicroBatch) -> torch.Tensor:
        start = time.perf_counter()
        loss = super()._forward(micro_batch)
        if micro_batch.num_images > 1:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.seconds_thrown_away.append(time.perf_counter() - start)
            raise torch.OutOfMemoryError("as if there was no memory for the backward")
        return loss


def two_ranks(images: list[dict[str, Any]], rounds: int) -> None:
    batch = images[2 * comm.get_rank() :][:1]
    sides = {
        name: Side(
            lambda m, *args, c=create: c(create_ddp_model(m, broadcast_buffers=False), *args),
            repeat(batch),
        )
        for name, create in (("raise", AccumulatingTrainer), ("split", SPLIT))
    }
    take_turns(sides.values(), rounds)
    if comm.is_main_process():
        plain = sides["raise"].seconds
        rows = [row(f"{name}, 1 image", side.seconds, plain) for name, side in sides.items()]
        header = ["two ranks", "s per iteration (median)", "ratio of medians"]
        print(markdown_table(header, rows))


def row(name: str, seconds: list[float], base: list[float]) -> list[str]:
    median = statistics.median(seconds)
    return [name, f"{median:.3f}", f"{median / statistics.median(base):.3f}"]
