# Copyright (c) the d2_memfit developers.
"""The checks of the doctor, with one line for each."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

from ..engine.defaults import MemfitMixin
from ..engine.window import count_objects, images_of
from ..errors import ConfigError, MemfitError
from ..job import Job, readable_loader
from ..planner.errors import one_line_errors
from . import job_checks
from .accumulation_check import accumulates, counts
from .patient import Patient, Untested, Unwell
from .run_checks import Remake, agrees_on_two_ranks, is_plain_by_default, resumes

__all__ = ["Finding", "answer_of_findings", "examine", "examine_runs"]


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


def examine(job: Job, trainer: Any = None, remake: Optional[Remake] = None) -> Iterator[Finding]:
    """Test a job in small iterations on the CPU, with errors injected in each phase.

    Args:
        trainer: the class that trains, if there is one. It is tested with ``MemfitMixin``.
        remake: returns the job, made for two ranks, and the trainer. It is called in two other
            processes, so it must be picklable. None skips the check of ranks.
    """
    patients: list[Patient] = []

    def batch() -> str:
        patients.append(Patient(job))
        images = images_of(patients[0].images) or [patients[0].images]
        num = count_objects(images[0])
        return f"two images can be made, the first with {num} objects. {_assumed(job)}".strip()

    yield _found("batch", batch)
    if not patients:
        return
    patient = patients[0]
    steps: dict[str, Callable[[Patient], str]] = {
        "iteration 0": job_checks.same_as_detectron2,
        "accumulation": accumulates,
        "recovery, memory runs out in the forward": partial(job_checks.recovers, where=0.3),
        "recovery, memory runs out in the backward": partial(job_checks.recovers, where=0.9),
        "recovery, memory runs out in evaluation": job_checks.recovers_in_evaluation,
        "state that a retry puts back": job_checks.puts_state_back,
        "normalisers": counts,
        "communication in the forward": job_checks.is_silent,
        "techniques": job_checks.usable_techniques,
    }
    for what, check in steps.items():
        yield _found(what, check, patient)
    yield from examine_runs(job, trainer, remake)


def examine_runs(
    job: Job, trainer: Any = None, remake: Optional[Remake] = None
) -> Iterator[Finding]:
    """Test a job with the images of its dataset, for the last lines of :func:`examine`."""
    steps: dict[str, Callable[..., str]] = {"estimate": partial(job_checks.is_estimated, job)}
    if trainer is not None and not issubclass(trainer, MemfitMixin):
        steps["trainer"] = partial(is_plain_by_default, job, trainer)
    steps["resume"] = partial(resumes, job, trainer)
    if remake is not None:
        steps["two ranks"] = partial(agrees_on_two_ranks, remake, trainer)
    for what, check in steps.items():
        yield _found(what, _on_dataset, job, check)


def answer_of_findings(findings: Sequence[Finding]) -> str:
    """Describe whether a job works, with the checks that failed or could not run."""
    not_well = [finding for finding in findings if finding.is_well is False]
    unknown = [finding for finding in findings if finding.is_well is None]
    num_well = len(findings) - len(not_well) - len(unknown)
    verdict = "Does not work" if not_well else "Works"
    counts = [f"{num_well} of {len(findings)} checks passed"]
    counts += [f"{len(not_well)} failed"] if not_well else []
    counts += [f"{len(unknown)} could not run here"] if unknown else []
    return "\n".join([f"{verdict}: {', '.join(counts)}", *map(str, [*not_well, *unknown])])


def _on_dataset(job: Job, check: Callable[[], str]) -> str:
    try:
        readable_loader(job.parts)
    except ConfigError as e:
        raise Untested(f"not tested: {e}") from e
    return check()


def _assumed(job: Job) -> str:
    return " ".join(f"Assumed: {line}." for line in job.assumptions)


def _found(what: str, check: Callable[..., str], *args: Any) -> Finding:
    try:
        with one_line_errors():
            try:
                return Finding(what, True, check(*args))
            except (Unwell, Untested) as e:
                return Finding(what, None if isinstance(e, Untested) else False, str(e))
    except MemfitError as e:
        text = re.sub(r"^the model of this job does not run \((.*?)\)\. ", r"\1. ", str(e))
        return Finding(what, False, text)
