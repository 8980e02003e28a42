# Copyright (c) the d2_memfit developers.
"""CPU seconds of an iteration beside those of the model, against Detectron2 and a plain loop.

The model is so small that what surrounds it shows: 200 linear layers, and 212 buffers that never
change, as many as a frozen R50-FPN has. Its losses take about 11 ms a forward and backward. Sides
take turns in one run, and each round has the same iterations. The figure is the ratio of the
medians of the CPU seconds of this process.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from detectron2.engine import SimpleTrainer
from detectron2.utils.events import EventStorage
from torch import nn

from d2_memfit import AccumulatingTrainer
from d2_memfit.config.settings import RecoveryOptions

from .common import machine, markdown_table, take_turns

LAYERS, BUFFERS, WIDTH = 200, 212, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each side")
    parser.add_argument("--iterations", type=int, default=100, help="iterations of a measurement")
    parser.add_argument("--steps", type=int, default=4, help="accumulation steps")


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    print(f"{LAYERS} linear layers, {BUFFERS} buffers. {machine()}.\n")
    steps = args.steps
    pairs = {
        "SimpleTrainer": SimpleTrainer,
        "ours": AccumulatingTrainer,
        "ours, split": partial(AccumulatingTrainer, recovery=RecoveryOptions()),
        f"plain loop, {steps} micro-batches": partial(PlainLoop, steps=steps),
        f"ours, {steps} micro-batches": partial(AccumulatingTrainer, accumulation_steps=steps),
        f"ours, split, {steps} micro-batches": partial(
            AccumulatingTrainer, accumulation_steps=steps, recovery=RecoveryOptions()
        ),
    }
    sides = {name: Side(make, args.iterations) for name, make in pairs.items()}
    take_turns(sides.values(), args.rounds)
    rows = []
    plain = 0.0
    for name, side in sides.items():
        median = statistics.median(side.seconds) / args.iterations
        if name.startswith(("SimpleTrainer", "plain")):
            plain = median
        rows.append([name, f"{1000 * median:.2f}", f"{median / plain:.3f}"])
    print(markdown_table(["", "ms per iteration (median)", "ratio of medians"], rows))


class Layers(nn.Module):
    """Linear layers with buffers, and two losses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        for i in range(BUFFERS):
            self.layers[i % LAYERS].register_buffer(f"buffer{i}", torch.zeros(WIDTH))

    def forward(self, batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        x = self.layers(torch.stack([image["image"] for image in batch]))
        return {"loss_a": x.mean(), "loss_b": x.square().mean()}


class Images(Iterable[Any]):
    """An endless loader of one batch of two images."""

    def __iter__(self) -> Any:
        batch = [{"image": torch.ones(WIDTH), "image_id": i} for i in range(2)]
        while True:
            yield batch


class PlainLoop(SimpleTrainer):
    """Gradient accumulation as it is written by hand."""

    def __init__(self, *args: Any, steps: int) -> None:
        super().__init__(*args)
        self._steps = steps

    def run_step(self) -> None:
        assert self.model.training
        self.optimizer.zero_grad()
        start = time.perf_counter()
        for _ in range(self._steps):
            loss_dict = self.model(next(self._data_loader_iter))
            (sum(loss_dict.values()) / self._steps).backward()
        self._write_metrics(loss_dict, time.perf_counter() - start)
        self.optimizer.step()


class Side:
    """A trainer, and the CPU seconds of each of its rounds."""

    def __init__(self, create_trainer: Callable[..., Any], iterations: int) -> None:
        torch.manual_seed(0)
        model = Layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        self.trainer = create_trainer(model, Images(), optimizer)
        self.iterations = iterations
        self.seconds: list[float] = []

    def round(self) -> None:
        with EventStorage():
            start = time.process_time()
            for _ in range(self.iterations):
                self.trainer.run_step()
            self.seconds.append(time.process_time() - start)
