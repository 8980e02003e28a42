# Copyright (c) the d2_memfit developers.
"""Time per image and peak of memory, if memory is sufficient.

In a round, each side in turn goes once through all images, with one optimizer step. The time is
from the first requested image to the end of the step. Sides are compared within one run: if one is
missing, all are measured again. Memory is counted byte by byte over all new tensors
(``TensorMeter``), in the second of two steps, when the optimizer's state exists. Parameters do not
count.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from detectron2.utils.events import EventStorage

from d2_memfit.memory import TensorMeter

from ..common import take_turns
from .job import Job, Stopwatch
from .models import mask_rcnn
from .results import Results
from .sides import ACCUMULATORS, MMENGINE_CHECKPOINTED, OURS_EXACT, OURS_SPLIT, PLAIN, Side

SIDES = [*ACCUMULATORS, OURS_SPLIT, MMENGINE_CHECKPOINTED, OURS_EXACT]
ONE_IMAGE = "Detectron2, 1 image a step"


def cuts(side: Side, num_images: int) -> dict[str, tuple[int, int]]:
    """Names of a side in the tables, each with its cut of the images."""
    if side is not PLAIN:
        return {side.name: side.cut(num_images)}
    return {f"{side.name}, {num_images} images at once": (num_images, 1), ONE_IMAGE: (1, 1)}


class Contestant:
    """A side with its own model, whose weights do not change at a rate of 0."""

    def __init__(
        self, side: Side, cut: tuple[int, int], images: list[Any], output_dir: Path
    ) -> None:
        self._train = side.load()
        self._model, self._optimizer = mask_rcnn(learning_rate=0.0, exact=side.techniques)
        self._job = Job(lambda: (self._model, self._optimizer), images, *cut, output_dir)
        self._stopwatch = Stopwatch(self._job, self._optimizer)
        self.seconds: list[float] = []

    def round(self) -> None:
        self._model.zero_grad(set_to_none=True)
        run_job(self._train, self._job)
        self.seconds.append(self._stopwatch.seconds)


def measure_time(results: Results, sides: list[Side], images: list[Any], rounds: int) -> None:
    names = {name: (s, cut) for s in sides for name, cut in cuts(s, len(images)).items()}
    if names.keys() <= {line["side"] for line in results.times()}:
        return
    run = 1 + max((line["run"] for line in results.of("time")), default=0)
    contestants = {
        name: Contestant(side, cut, images, results.path.parent)
        for name, (side, cut) in names.items()
    }
    take_turns(contestants.values(), rounds)
    for name, contestant in contestants.items():
        seconds = [s / len(images) for s in contestant.seconds]
        results.add(
            "time",
            side=name,
            run=run,
            seconds_per_image=statistics.median(seconds),
            best=min(seconds),
            rounds=rounds,
        )


def measure_memory(results: Results, sides: list[Side], images: list[Any]) -> None:
    for side in sides:
        for name, cut in cuts(side, len(images)).items():
            if results.find("memory", side=name) is None:
                peak_bytes = peak_of_second_step(side, cut, images, results.path.parent)
                results.add("memory", side=name, peak_mib=round(peak_bytes / 2**20))


def peak_of_second_step(
    side: Side, cut: tuple[int, int], images: list[Any], output_dir: Path
) -> int:
    model, optimizer = mask_rcnn(learning_rate=0.0, exact=side.techniques)
    job = Job(lambda: (model, optimizer), images * 2, *cut, output_dir)
    train = side.load()
    steps = len(images) // (cut[0] * cut[1])  # of the first half
    with TensorMeter() as meter:

        def after_step(*_: object) -> None:
            nonlocal steps
            steps -= 1
            if steps == 0:
                meter.peak_bytes = meter.live_bytes

        optimizer.register_step_post_hook(after_step)
        run_job(train, job)
    return meter.peak_bytes


def run_job(train: Callable[[Job], None], job: Job) -> None:
    torch.manual_seed(0)
    with EventStorage():
        train(job)
