# Copyright (c) the d2_memfit developers.
"""The examination of a job: one line for each check."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import MemfitError
from ..job import Job
from ..planner.explain import one_line_errors
from . import job_checks
from .patient import Patient

__all__ = ["Finding", "examine"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        what: the subject of the check.
        is_well: whether it works.
        text: one line; with what to do if it does not work.
    """

    what: str
    is_well: bool
    text: str

    def __str__(self) -> str:
        return f"{'ok' if self.is_well else 'NO':3} {self.what}: {self.text}"


def examine(job: Job, trainer: Any = None) -> Iterator[Finding]:
    """Test a job in small iterations on the CPU, with errors injected in each phase.

    Args:
        trainer: the class that trains, if there is one; it is tested with ``MemfitMixin``, too.
    """
    patients: list[Patient] = []

    def batch() -> str:
        patients.append(Patient(job))
        first = patients[0].images[0]
        num = len(first.get("instances", ())) if isinstance(first, dict) else 0
        return f"two images are made, the first with {num} objects. {_assumed(job)}".strip()

    yield _found("batch", batch)
    if not patients:
        return
    patient = patients[0]
    steps: dict[str, Callable[[Patient], str]] = {
        "iteration 0": job_checks.same_as_detectron2,
        "accumulation": job_checks.accumulates,
        "recovery, memory runs out in the forward": partial(job_checks.recovers, where=0.3),
        "recovery, memory runs out in the backward": partial(job_checks.recovers, where=0.9),
        "recovery, memory runs out in evaluation": job_checks.recovers_in_evaluation,
        "state that a retry puts back": job_checks.puts_state_back,
        "normalisers": job_checks.counts,
        "communication in the forward": job_checks.is_silent,
        "estimate": job_checks.is_estimated,
        "techniques": job_checks.usable_techniques,
    }
    for what, check in steps.items():
        yield _found(what, check, patient)
    if trainer is not None:
        yield _found("trainer", job_checks.trains, patient, trainer)


def _assumed(job: Job) -> str:
    return " ".join(f"Assumed: {line}." for line in job.batches.assumptions)


def _found(what: str, check: Callable[..., str], *args: Any) -> Finding:
    try:
        with one_line_errors():
            try:
                return Finding(what, True, check(*args))
            except job_checks.Unwell as e:
                return Finding(what, False, str(e))
    except MemfitError as e:
        text = re.sub(r"^the model of this job does not run \((.*?)\)\. ", r"\1. ", str(e))
        return Finding(what, False, text)
