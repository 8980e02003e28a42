# Copyright (c) the d2_memfit developers.
"""Tests of gradient accumulation for any training loop."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import torch
from detectron2.utils.events import EventStorage
from torch import nn

from .common.errors import DataError, MemfitError
from .common.snapshot import Snapshot
from .config.settings import NormalizerOptions
from .engine.loss_check import LIMIT, check_losses
from .engine.loss_report import HELP, LossReport, gradient_of
from .engine.window import as_given, images_of
from .job import LossFn, losses_of

__all__ = ["AccumulationFinding", "check_accumulation"]

# Leaves the gradients of some micro-batches in the parameters, as a training loop does.
Accumulate = Callable[[nn.Module, Sequence[Any]], Any]

_BY_IMAGES = NormalizerOptions("off")  # a loop answers no counts


@dataclass(frozen=True)
class AccumulationFinding:
    """A result of :func:`check_accumulation`.

    Attributes:
        what: name of a loss, or "loop".
        word: "exact" (to 1e-3 of the gradient), "other" or "not known".
        distance: relative, of the gradient of single images from that of one forward over them.
        why: what is known about it; "" if it is exact.
    """

    what: str
    word: str
    distance: float
    why: str

    def __str__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"{self.what}: {self.word}, {self.distance:.2g} of the gradient{why}"


def check_accumulation(
    model: nn.Module,
    loss_fn: Optional[LossFn],
    batch: Any,
    accumulate: Optional[Accumulate] = None,
) -> list[AccumulationFinding]:
    """Test whether single images, accumulated, have the gradient of one forward over them.

    The losses are tested for a loop that weights each micro-batch by its images. With
    ``accumulate``, the loop is tested, too: its sums that are not divided, and its sums that are
    divided twice. Model, gradients and random states stay as they are.

    Args:
        model: in the mode in which it is trained.
        loss_fn: called as ``loss_fn(model, batch)``, returns a loss or a dict of losses; None calls
            the model.
        batch: at least two images, with labels: a list of dicts, or equally long columns such as
            (images, targets). Different numbers of objects tell more.
        accumulate: called as ``accumulate(model, micro_batches)``, runs forward and backward of
            each of them as the loop does, and does not step.

    Raises:
        DataError: the batch cannot be cut into images, or has fewer than two.
        ConfigError: the losses cannot be trained on.
        MemfitError: the model raises an error for images together and one by one.
    """
    images = images_of(batch)
    if images is None or len(images) < 2:
        raise DataError(
            "check_accumulation needs a batch of at least two images: a list of dicts, or equally "
            f"long columns such as (images, targets), got a {type(batch).__name__}"
        )
    kept = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    try:
        with EventStorage():
            report = check_losses(model, partial(losses_of, loss_fn=loss_fn), images, _BY_IMAGES)
            if "losses" in report.unchecked:
                raise MemfitError(f"the losses cannot be checked: {report.unchecked['losses']}")
            found = [_of_loss(report, name) for name in [*report.names, *report.unchecked]]
            loop = [_of_loop(model, accumulate, images, report)] if accumulate else []
    finally:
        for p, gradient in zip(model.parameters(), kept):
            p.grad = gradient
    return [*{f.what: f for f in found}.values(), *loop]


def _of_loss(report: LossReport, name: str) -> AccumulationFinding:
    if name in report.off:
        return AccumulationFinding(name, "other", report.off[name], f"see {HELP}")
    why = report.unchecked.get(name, "")
    return AccumulationFinding(name, "not known" if why else "exact", 0.0, why)


def _of_loop(
    model: nn.Module, accumulate: Accumulate, images: Sequence[Any], report: LossReport
) -> AccumulationFinding:
    """Compare the gradient that a loop leaves after single images with that after one batch."""

    def gradient(batches: Sequence[Any]) -> torch.Tensor:
        before = Snapshot(model, model.parameters())
        with torch.enable_grad():
            accumulate(model, [as_given(copy.deepcopy(batch)) for batch in batches])
        found = gradient_of(list(model.parameters()))
        before.restore()
        model.zero_grad(set_to_none=True)
        return found

    whole, parts = gradient([list(images)]), gradient([[image] for image in images])
    number = len(images)
    distance = float((parts - whole).norm() / whole.norm())
    if distance <= LIMIT:
        return AccumulationFinding("loop", "exact", distance, "")
    factor = float(parts @ whole / (whole @ whole))
    near = min((number, 1.0, 1 / number), key=lambda f: abs(math.log(max(factor, 1e-9) / f)))
    reasons = {
        number: f"it sums {number} micro-batches and does not divide by their number",
        1.0: f"its losses do: {', '.join(report.off)}",
        1 / number: f"it divides by the number of micro-batches twice, {number} x {number}",
    }
    why = f"the gradient is {factor:.3g} times as long: {reasons[near]}"
    return AccumulationFinding("loop", "other", distance, why)
