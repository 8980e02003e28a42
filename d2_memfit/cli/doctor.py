# Copyright (c) the d2_memfit developers.
"""The command doctor."""

import argparse
import sys
from functools import partial
from typing import Any

from ..doctor.examination import answer_of_findings, examine
from ..job import Job
from .options import job_of, load_config, trainer_of
from .plan import next_plan, with_notes
from .screen import put_together, show, show_progress

__all__ = ["doctor"]

_UNWELL = 3  # exit status


def doctor(args: argparse.Namespace) -> None:
    job, trainer = _job_and_trainer(args)
    remake = partial(_job_and_trainer, args) if job.ranks > 1 else None
    findings = [*examine(job, trainer, remake, lambda what: show_progress(f"Checking: {what}"))]
    is_well = all(finding.is_well is not False for finding in findings)
    lines = "\n".join(map(str, findings))
    answer, details = with_notes(args, answer_of_findings(findings), lines)
    show(put_together(args, answer, details, next_plan(args) if is_well else ""))
    if not is_well:
        sys.exit(_UNWELL)


def _job_and_trainer(args: argparse.Namespace) -> tuple[Job, Any]:
    return job_of(args, load_config(args)), trainer_of(args)
