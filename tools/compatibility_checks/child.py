# Copyright (c) the d2_memfit developers.
"""The doctor in one project, in its own process: python -m compatibility_checks.child.

The parent passes arguments as JSON, and reads a line of JSON for each finding.
"""

import json
import resource
import sys
import tempfile
import time
import traceback
import warnings
from functools import partial
from pathlib import Path

import torch

from d2_memfit import Job
from d2_memfit.doctor import Finding, examine, examine_runs
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimates import DryJob
from d2_memfit.planner.search import plan_memory

from .projects import PROJECTS, made

__all__ = ["PREFIX", "main"]

PREFIX = "compatibility: "

_CARD = "cuda"  # device of the plans
_GB = 2**30
_OF_ALL = 0.7  # a plan's share of the recipe's memory


def main() -> None:
    args = json.loads(sys.argv[1])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = args["memory_bytes"] if most < 0 else min(args["memory_bytes"], most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    project = next(p for p in PROJECTS if p.name == args["project"])
    folder = Path(args["folder"])
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        remake = partial(made, project.name, folder, Path(scratch))
        job, trainer = remake(ranks=1)
        run = examine if project.has_plain_step else examine_runs
        for finding in run(job, trainer, partial(remake, ranks=2)):
            if finding.what == "estimate" and not project.has_plain_step:
                continue
            _say(finding, time.perf_counter() - start)
        if project.has_plain_step:
            try:
                finding = _plan(project.job(folder / project.tree, full_size=True))
            except Exception as e:
                traceback.print_exc()
                finding = Finding("plan", False, f"{type(e).__name__}: {e}")
            _say(finding, time.perf_counter() - start)


def _plan(job: Job) -> Finding:
    """Plan the project's own recipe for a card with less memory than it needs."""
    job = job.with_settings({"SOLVER.IMS_PER_BATCH": 2})
    needs = DryJob(job, DeviceModel.load(_CARD)).least_bytes()
    budget_gb = _OF_ALL * needs / _GB / (1 - job.cfg.MEMFIT.PLAN.MARGIN)
    plan = plan_memory(job, budget_gb, device=_CARD)
    names = ", ".join(step.name for step in plan.steps)
    text = f"{needs / _GB:.1f} GB in {budget_gb:.1f} by {names or 'nothing'}"
    return Finding("plan", plan.fits, text if plan.fits else f"none for {budget_gb:.1f} GB")


def _say(finding: Finding, seconds: float) -> None:
    print(PREFIX + json.dumps({**vars(finding), "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
