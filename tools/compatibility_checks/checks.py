# Copyright (c) the d2_memfit developers.
"""The checks of each project; each returns the text of its cell."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from detectron2.utils.events import EventStorage

from d2_memfit import AccumulatingTrainer
from d2_memfit.measure.injection import Injector, seed_all
from d2_memfit.patching import replaced_functions

from .gradients import gradient
from .subject import Outcome, Subject, state_of

__all__ = ["CHECKS", "accumulates", "recovers", "resumes", "same_loss", "trains"]

_SPLIT = {"MEMFIT.OOM.POLICY": "split"}


def trains(subject: Subject) -> str:
    """Run two iterations with the project's loader; the weights must equal plain Detectron2's."""
    plain, ours = _both(subject)
    return _compare(ours, plain, "weights differ from plain Detectron2's")


def same_loss(subject: Subject) -> str:
    plain, ours = _both(subject)
    first, expected = ours.losses[0], plain.losses[0]
    return "y" if first == expected else f"{first:.6g}, plain {expected:.6g}"


def accumulates(subject: Subject) -> str:
    """Compare two batches per step, each with its own counts, with the mean of their gradients."""
    images = subject.project.images
    batches = subject.record(2, images)
    settings = {
        **subject.settings(images),
        "SOLVER.ACCUMULATION_STEPS": 2,
        "MEMFIT.NORMALIZERS.POLICY": "off",
    }
    ours = subject.run(settings, batches, num_iterations=1, name="accumulates")
    if not subject.project.has_plain_step:
        return "trains, not compared"
    parts = subject.parts(subject.settings(images))
    with EventStorage():
        seed_all(100)
        parts.optimizer.zero_grad()
        for batch in copy.deepcopy(batches):
            (subject.losses(parts.model, batch) * 0.5).backward()
        subject.step(parts)
    expected = Outcome(ours.losses, state_of(parts.model, parts.optimizer))
    return _compare(ours, expected, "weights differ from those of the mean gradient")


def resumes(subject: Subject) -> str:
    """Compare a run that ends after its first iteration, and is resumed, with one that does not."""
    batches = subject.record(2, subject.project.images)
    settings = subject.settings(subject.project.images)
    whole = subject.run(settings, batches, name="whole")
    subject.run(settings, batches, num_iterations=1, saves=True, name="resumed")
    rest = subject.run(settings, batches, resumes=True, name="resumed")
    if len(rest.losses) != 1:
        return f"{len(rest.losses)} iterations after resuming, not 1"
    return _compare(rest, whole, "weights differ from those of a run that was not ended")


def recovers(subject: Subject) -> str:
    """Compare errors in the forward and the backward with the same images in halves."""
    images = 2 * subject.project.least_images
    batches = subject.record(1, images)
    settings = subject.settings(images)
    in_halves = {**settings, "MEMFIT.MICRO_BATCH": subject.project.least_images}
    expected = subject.run(in_halves, batches, num_iterations=1, name="halves")
    with _injected() as whole:
        subject.run({**settings, **_SPLIT}, batches, num_iterations=1, name="undisturbed")
    cells = []
    phases = {"forward": (0, whole.forward), "backward": (whole.forward, whole.total)}
    for phase, (begin, end) in phases.items():
        with _injected((begin + end) // 2) as injector:
            ours = subject.run({**settings, **_SPLIT}, batches, num_iterations=1, name=phase)
        if injector.fail_at:
            cells.append(f"{phase}: nothing was injected")
        cell = _compare(ours, expected, "weights differ from those of halves")
        cells += [f"{phase}: {cell}"] if cell != "y" else []
    return "; ".join(cells) or "y"


def _both(subject: Subject) -> tuple[Outcome, Outcome]:
    if subject.outcomes is None:
        settings = subject.settings(subject.project.images)
        plain = subject.run(settings, plain=True, name="plain")
        subject.outcomes = plain, subject.run(settings, name="memfit")
    return subject.outcomes


def _compare(ours: Outcome, expected: Outcome, text: str) -> str:
    """Return "y" if all that both have is equal to the last bit."""
    worst, where = 0.0, ""
    common = expected.state.keys() & ours.state.keys()
    for name in common:
        one, other = ours.state[name], expected.state[name]
        if not isinstance(one, torch.Tensor):
            one, other = torch.tensor(one), torch.tensor(other)
        if one.shape != other.shape:
            return f"{name} has another shape"
        if one.isnan().any() or not torch.equal(one, other):
            scale = other.double().abs().max().clamp(min=1e-12)
            difference = float((one.double() - other.double()).abs().max() / scale)
            if math.isnan(difference) or difference >= worst:
                worst, where = difference, name
    if not where:
        return "y"
    return f"{text} by {worst:.1e} ({where})"


class _Watched(Injector):
    """An injector that knows the number of allocations in the first forward."""

    forward = 0

    @property
    def total(self) -> int:
        return self.num_allocations


@contextmanager
def _injected(*fail_at: int) -> Iterator[_Watched]:
    """While open, run forwards and backwards of all trainers in an injector."""
    injector = _Watched(fail_at)
    forward, backward = AccumulatingTrainer._forward, AccumulatingTrainer._backward

    def run_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _failing_once(injector):
            result = forward(self, *args, **kwargs)
        injector.forward = injector.forward or injector.num_allocations
        return result

    def run_backward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _failing_once(injector):
            return backward(self, *args, **kwargs)

    replacements = {"_forward": lambda _: run_forward, "_backward": lambda _: run_backward}
    with replaced_functions([AccumulatingTrainer], replacements):
        yield injector


@contextmanager
def _failing_once(injector: _Watched) -> Iterator[None]:
    try:
        with injector:
            yield
    except torch.OutOfMemoryError:
        injector.fail_at = set()
        raise


CHECKS = {
    "trains": trains,
    "same loss at iteration 0": same_loss,
    "accumulates": accumulates,
    "gradient": gradient,
    "resumes": resumes,
    "recovers": recovers,
}
