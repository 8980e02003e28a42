# Copyright (c) the d2_memfit developers.
"""The commands doctor and measure-gpu, which test."""

from argparse import Namespace
from functools import partial
from typing import Any

from ..doctor.examination import answer_of_findings, examine
from ..job import Job
from .options import job_of, load_config, trainer_of
from .plan import give_answer, next_plan
from .screen import show, show_progress


def doctor(args: Namespace) -> None:
    job, trainer = _job_and_trainer(args)
    remake = partial(_job_and_trainer, args) if job.ranks > 1 else None
    findings = [*examine(job, trainer, remake, lambda what: show_progress(f"Checking: {what}"))]
    is_well = all(finding.is_well is not False for finding in findings)
    answer, details = answer_of_findings(findings), "\n".join(map(str, findings))
    next_step = next_plan(args, job.budget_gb) if is_well else ""
    give_answer(args, findings, answer, details, next_step, is_good=is_well)


def _job_and_trainer(args: Namespace) -> tuple[Job, Any]:
    return job_of(args, load_config(args)), trainer_of(args)


def measure_gpu(args: Namespace) -> None:
    from .. import measure

    for text in measure.measure_gpu("cuda:0", args.seconds, args.output, args.items, args.small):
        show(text)
