# Copyright (c) the d2_memfit developers.
"""The six checks of the doctor, with one line for each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import torch
from detectron2.engine import SimpleTrainer
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage
from torch import nn

from ..common.errors import ConfigError, MemfitError, one_line
from ..common.snapshot import Snapshot, changed_by_forward, state_of
from ..config.settings import NormalizerOptions
from ..engine.defaults import MemfitMixin
from ..engine.loss_check import check_losses
from ..engine.window import images_of
from ..job import Job, capture_loader, statistics_of
from ..planner.errors import one_line_errors
from .patient import Patient, Untested, Unwell, as_planned
from .runs import Remake, agrees_on_two_ranks, is_plain_by_default, resumes

__all__ = ["Finding", "answer_of_findings", "examine", "examine_runs"]

_WARM_UP = 4  # iterations
_LATE = 0.9  # share of an iteration's allocations: in the backward
_FEW = 5  # names in a line


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        what: the subject of the check.
        is_well: whether it works; None if this could not be tested here.
        text: one line. If something does not work, it says what to do.
    """

    what: str
    is_well: Optional[bool]
    text: str

    def __str__(self) -> str:
        mark = {True: "ok", False: "NO", None: "--"}[self.is_well]
        return f"{mark:3} {self.what}: {self.text}"


Say = Callable[[str], Any]


def examine(
    job: Job, trainer: Any = None, remake: Optional[Remake] = None, say: Say = str
) -> Iterator[Finding]:
    """Test a job in small iterations on the CPU.

    Args:
        trainer: the class that trains, if there is one. It is tested with ``MemfitMixin``.
        remake: returns the job, made for two ranks, and the trainer. It is called in two other
            processes, so it must be picklable. None skips the check of ranks.
        say: called with the name of each check before it begins.
    """
    patients: list[Patient] = []

    def same() -> str:
        patients.append(Patient(job))
        assumed = " ".join(f"Assumed: {line}." for line in job.batches.assumptions)
        return f"{same_as_detectron2(patients[0])}. {assumed}".strip()

    yield _found(say, "iteration 0", same)
    for patient in patients:
        yield _found(say, "accumulation", accumulates, patient)
        yield _found(say, "recovery", recovers, patient)
    yield from examine_runs(job, trainer, remake, say)


def examine_runs(
    job: Job, trainer: Any = None, remake: Optional[Remake] = None, say: Say = str
) -> Iterator[Finding]:
    """Test a job with the images of its dataset, for the last lines of :func:`examine`."""
    if trainer is not None and not issubclass(trainer, MemfitMixin):
        yield _found(say, "trainer", _on_dataset, job, is_plain_by_default, job, trainer)
    yield _found(say, "resume", _on_dataset, job, resumes, job, trainer)
    if remake is not None:
        yield _found(say, "two ranks", _on_dataset, job, agrees_on_two_ranks, remake, trainer)


def answer_of_findings(findings: Sequence[Finding]) -> str:
    """Describe whether a job works, with the checks that failed or could not run."""
    not_well = [finding for finding in findings if finding.is_well is False]
    unknown = [finding for finding in findings if finding.is_well is None]
    num_well = len(findings) - len(not_well) - len(unknown)
    counts = [f"{num_well} of {len(findings)} checks passed"]
    counts += [f"{len(not_well)} failed"] if not_well else []
    counts += [f"{len(unknown)} could not run here"] if unknown else []
    verdict = "Does not work" if not_well else "Works"
    return "\n".join([f"{verdict}: {', '.join(counts)}", *map(str, [*not_well, *unknown])])


@as_planned()
def same_as_detectron2(patient: Patient) -> str:
    """Compare an iteration with one of Detectron2's ``SimpleTrainer``."""

    def without_change(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), 0.0)

    def plain() -> list[torch.Tensor]:
        model, with_losses = patient.model(), nn.Module()
        with_losses.forward = partial(patient.losses, model)
        trainer = SimpleTrainer(with_losses, [patient.batch()], without_change(model))
        seed_all_rng(0)
        with EventStorage():
            trainer.run_step()
        return _results(model)

    for _ in range(_WARM_UP):  # functions of torch.jit differ in the first calls
        expected = plain()
        trainer, loss = patient.step(without_change)
        found = _results(trainer.model)
        if len(found) == len(expected) and all(map(torch.equal, found, expected)):
            return f"loss {loss:.4g} and gradients equal Detectron2's, bit by bit"
    raise Unwell("loss or gradients differ from those of Detectron2's SimpleTrainer")


@as_planned()
def accumulates(patient: Patient) -> str:
    """Check the losses as a training does before its first window."""
    images = images_of(patient.images)
    if images is None:
        raise Untested("not tested: batches cannot be cut into images")
    images = [_with_pixels(image, seed) for seed, image in enumerate(images)]
    options = NormalizerOptions.from_cfg(patient.job.cfg)
    model = patient.model()
    with EventStorage():
        report = check_losses(model, patient.losses, images, options)
    if report.off:
        raise Unwell("; ".join(report.complaints()))
    if not report.names:
        raise Untested(str(report))
    places = sorted({"{}:{}".format(*place[0]) for _, place, _ in report.counts})
    counts = [f"counted over the window: {', '.join(places)}"] if places else []
    return "; ".join([str(report), *counts, *report.complaints()])


def _with_pixels(image: Any, seed: int) -> Any:
    """The image with random pixels: those of a stand-in are all the same."""
    pixels = image.get("image") if isinstance(image, dict) else None
    if not isinstance(pixels, torch.Tensor):
        return image
    generator = torch.Generator().manual_seed(seed)
    return {**image, "image": torch.randint(256, pixels.shape, generator=generator).to(pixels)}


@as_planned()
def recovers(patient: Patient) -> str:
    """Check that a failed backward leaves no trace in the model or in the weights after a step."""
    model = patient.model()
    before, at_start = state_of(model), Snapshot(model)
    with EventStorage():
        patient.losses(model, patient.batch())
    at_start.restore()
    changed, _ = changed_by_forward(before, state_of(model))
    if changed:
        raise Unwell(
            f"a forward changes {', '.join(changed[:_FEW])}, which a retry does not put back: keep "
            "it in a number or a list, or write save_for_retry() and restore_for_retry(state)"
        )
    step = partial(patient.step, patient.job.parts.build_optimizer)
    num_allocations = step(fail_at=(10**9,))[0].injector.num_allocations
    undisturbed, _ = step(micro_batch_size=1)
    recovered, _ = step(fail_at=(int(num_allocations * _LATE),))
    if recovered.window_sizes != (1, 1):
        raise Unwell(f"the two images were run as {recovered.window_sizes} instead of one by one")
    pairs = [*zip(_results(recovered.model), _results(undisturbed.model))]
    differ = [pair for pair in pairs if not torch.equal(*pair)]
    if differ:
        raise Unwell(
            f"{len(differ)} of {len(pairs)} weights and gradients differ from those of an "
            "iteration without the error: something that a forward changes is not put back"
        )
    return "run again one by one, the images give the same weights and gradients, bit by bit"


def _results(model: nn.Module) -> list[torch.Tensor]:
    """Weights and gradients. Of the gradients, Adam's first step has only the signs."""
    return [t for p in model.parameters() for t in (p, p.grad) if t is not None]


def _on_dataset(job: Job, check: Callable[..., str], *args: Any) -> str:
    try:
        loader = capture_loader(job.parts.build_train_loader)
        if not loader.mappers or statistics_of(loader.names) is None:
            names = ", ".join(loader.names) or "without a name"
            raise ConfigError(f"the training dataset {names} cannot be read")
    except ConfigError as e:
        raise Untested(f"not tested: {e}") from e
    return check(*args)


def _found(say: Say, what: str, check: Callable[..., str], *args: Any) -> Finding:
    say(what)
    try:
        with one_line_errors():
            return Finding(what, True, check(*args))
    except MemfitError as e:
        return Finding(what, None if isinstance(e, Untested) else False, one_line(e))
