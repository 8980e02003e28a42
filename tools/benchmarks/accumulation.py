# Copyright (c) the d2_memfit developers.
"""Time and memory of gradient accumulation against plain Detectron2.

The model is Detectron2's Mask R-CNN R50-FPN with random weights. The images are photographs of
coins. Time: plain SimpleTrainer with one image per iteration and AccumulatingTrainer take turns in
one run. Each has its own loader, with the same images in the same order. The figure is the ratio of
the medians of the time per image. Memory: the peak of all live tensors, counted byte by byte, in an
iteration after the first, when optimizer state exists.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from detectron2.data import build_detection_train_loader
from detectron2.data.samplers import TrainingSampler
from detectron2.engine import SimpleTrainer
from pages import markdown_table

from d2_memfit import AccumulatingTrainer
from d2_memfit.memory import TensorMeter

from .common import Side, coins, machine, take_turns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, nargs=2, default=[480, 640], help="height, width")
    parser.add_argument("--steps", type=int, default=4, help="accumulation steps")
    parser.add_argument("--rounds", type=int, default=11, help="measurements of each side")
    parser.add_argument("--workers", type=int, default=1, help="processes of each loader")


def run(args: argparse.Namespace) -> None:
    print(f"Mask R-CNN R50-FPN, {args.size[0]} x {args.size[1]} pixels. {machine()}.\n")
    with coins(*args.size) as (dicts, mapper):

        def loader() -> Iterable[Any]:
            sampler = TrainingSampler(len(dicts), seed=0)
            return build_detection_train_loader(
                dicts,
                mapper=mapper,
                sampler=sampler,
                total_batch_size=1,
                num_workers=args.workers,
            )

        print(compare_times(loader, args.steps, args.rounds), "\n")
        print(compare_memory([mapper(d) for d in dicts[: args.steps]]))


def compare_times(loader: Callable[[], Iterable[Any]], steps: int, rounds: int) -> str:
    sides = {
        "plain, 1 image": Side(SimpleTrainer, loader(), steps),
        "ours, 1 x 1": Side(AccumulatingTrainer, loader(), steps),
        f"ours, {steps} x 1": Side(_accumulating(steps), loader()),
    }
    take_turns(sides.values(), rounds)
    medians = {name: statistics.median(side.seconds) / steps for name, side in sides.items()}
    plain = next(iter(medians.values()))
    rows = [
        [name, f"{median:.3f}", f"{min(side.seconds) / steps:.3f}", f"{median / plain:.3f}"]
        for (name, median), side in zip(medians.items(), sides.values())
    ]
    header = ["", "s per image (median)", "s per image (best)", "ratio of medians"]
    return markdown_table(header, rows)


def compare_memory(images: list[dict[str, Any]]) -> str:
    steps = len(images)
    singles = [[image] for image in images] * 2
    sides = {
        "plain, 1 image": Side(SimpleTrainer, singles),
        "ours, 1 x 1": Side(AccumulatingTrainer, singles),
        f"ours, {steps} x 1": Side(_accumulating(steps), singles),
        f"plain, {steps} images": Side(SimpleTrainer, [images] * 2),
    }
    rows = []
    for name, side in sides.items():
        with TensorMeter() as meter:
            for _ in range(2):
                meter.peak_bytes = meter.live_bytes
                side.round()
        rows.append([name, f"{meter.peak_bytes / 2**20:.0f}"])
    gradients = sum(p.numel() * p.element_size() for p in side.trainer.model.parameters())
    header = ["", "peak of activations, gradients and optimizer state, MiB"]
    return markdown_table(header, rows) + (
        f"\n\nThe gradients alone are at most {gradients / 2**20:.0f} MiB. They wait for the next "
        "micro-batch while its activations are alive."
    )


def _accumulating(steps: int) -> Callable[..., AccumulatingTrainer]:
    return partial(AccumulatingTrainer, accumulation_steps=steps)
