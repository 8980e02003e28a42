# Copyright (c) the d2_memfit developers.
"""The gradient that reaches the optimizer, against the full batch's.

The models are the small ones of ``tools/benchmark.py gradients``, trained for a while on
photographs of projects/Coins. Sampled anchors and proposals are the same each time. The full
batch's gradient comes from one forward over exactly the images of the step. The figure is
norm(difference) / norm(full) over all parameters, in float32.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from detectron2.utils.events import EventStorage
from torch import nn

from ..common import coins
from ..gradients import Samples, family
from ..gradients import train as train_for_a_while
from .job import Job, StepGradients
from .results import Results
from .sides import ACCUMULATORS, MMENGINE_CHECKPOINTED, OURS_SPLIT, Side

SIDES = [*ACCUMULATORS, OURS_SPLIT, MMENGINE_CHECKPOINTED]
MODELS = ("RPN, every anchor sampled", "Mask R-CNN", "DETR-like")


class Case(NamedTuple):
    """Images that a finite loader gives once; the last step is compared."""

    name: str
    num_images: int
    batch_size: int
    accumulation_steps: int
    num_steps: int
    images_of_last_step: int


CASES = [
    Case("8 x 1", 8, 1, 8, 1, 8),
    Case("3 + 3 + 2", 8, 3, 3, 1, 8),
    Case("the last 2 of 10, 4 x 1", 10, 1, 4, 3, 2),
]


def measure(results: Results, sides: list[Side], num_iterations: int) -> None:
    """Measure the sides. ``num_iterations`` is the length of the training before."""
    missing = [
        (model, side, case)
        for model in MODELS
        for side in sides
        for case in CASES
        if results.find("gradients", model=model, side=side.name, case=case.name) is None
    ]
    with coins(160, 224) as (dicts, mapper):
        images = [mapper(d) for d in dicts] if missing else []
    for name in dict.fromkeys(model for model, _, _ in missing):
        model = train_for_a_while(family(name), images, num_iterations)
        kept: dict[tuple[str, int], Any] = {}
        for side, case in [(s, c) for m, s, c in missing if m == name]:
            own = copy.deepcopy(model)  # a side may change it
            Samples(own, kept)
            outcome = error_of_last_step(own, side, case, images, results.path.parent)
            results.add("gradients", model=name, side=side.name, case=case.name, outcome=outcome)


def error_of_last_step(
    model: nn.Module, side: Side, case: Case, images: list[Any], output_dir: Path
) -> str:
    """Relative error of the last step, or what happened in its place."""
    cut = (case.batch_size, case.accumulation_steps)
    if not side.accumulates:
        cut = (case.batch_size * case.accumulation_steps, 1)
    images = images[: case.num_images]
    full = full_gradient(model, images[-case.images_of_last_step :])
    steps, error = steps_of(model, side.load(), cut, images, output_dir)
    if len(steps) < case.num_steps:
        return error or "no step"
    return f"{((steps[-1] - full).norm() / full.norm()).item():.1e}"


def steps_of(
    model: nn.Module,
    train: Callable[[Job], None],
    cut: tuple[int, int],
    images: list[Any],
    output_dir: Path,
) -> tuple[list[torch.Tensor], str]:
    """The gradient of each step, and the name of the error that ended them."""
    model.zero_grad(set_to_none=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    gradients = StepGradients(optimizer)
    error = ""
    try:
        with EventStorage():
            train(Job(lambda: (model, optimizer), images, *cut, output_dir))
    except Exception as e:
        error = type(e).__name__
    gradients.stop()
    return gradients.steps, error


def full_gradient(model: nn.Module, images: list[Any]) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    with EventStorage():
        sum(model(images).values()).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
