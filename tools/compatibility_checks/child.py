# Copyright (c) the d2_memfit developers.
"""The doctor in one project, in its own process: python -m compatibility_checks.child.

Arguments are the name of the project, the folder of all trees, and the file for the findings, a
line of JSON each.
"""

import json
import sys
import tempfile
import traceback
import warnings
from functools import partial
from pathlib import Path

import torch

from d2_memfit import Job
from d2_memfit.common import GB
from d2_memfit.doctor.examination import Finding, examine, examine_runs
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimate import DryJob
from d2_memfit.planner.plan import plan_memory

from .project import PROJECTS, made

__all__ = ["main"]

_CARD = "cuda"  # device of the plans
_OF_ALL = 0.7  # a plan's share of the recipe's memory


def main(name: str, folder: str, file: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    project = PROJECTS[name]

    def say(finding: Finding) -> None:
        print(json.dumps(vars(finding)), file=findings, flush=True)

    with tempfile.TemporaryDirectory() as scratch, open(file, "w") as findings:
        remake = partial(made, name, Path(folder), Path(scratch))
        job, trainer = remake(ranks=1)
        run = examine if project.has_plain_step else examine_runs
        for finding in run(job, trainer, partial(remake, ranks=2)):
            say(finding)
        if project.has_plain_step:
            say(_plan(project.job(Path(folder) / project.tree, full_size=True)))


def _plan(job: Job) -> Finding:
    """Plan the project's own recipe for a card with less memory than it needs."""
    try:
        job = job.with_settings({"SOLVER.IMS_PER_BATCH": 2})
        device = DeviceModel.load(_CARD)
        dry_job = DryJob(job, device)
        needs = dry_job.total_bytes()
        budget_gb = _OF_ALL * max(map(dry_job.budget_bytes, dry_job.uses())) / GB
        plan = plan_memory(job, budget_gb, device=_CARD)
    except Exception as e:
        traceback.print_exc()
        return Finding("plan", False, f"{type(e).__name__}: {e}")
    names = ", ".join(step.name for step in plan.steps)
    text = f"{needs / GB:.1f} GB in {budget_gb:.1f} by {names or 'nothing'}"
    return Finding("plan", plan.fits, text if plan.fits else f"none for {budget_gb:.1f} GB")


if __name__ == "__main__":
    main(*sys.argv[1:])
