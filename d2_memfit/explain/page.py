# Copyright (c) the d2_memfit developers.
"""The content of the HTML page of an explained run."""

from typing import Optional

from ..planner.estimates import DryJob
from ..planner.writing import chart_of, keys_as_yaml
from ..report import Measured, Page
from .explanation import ExplainedRun, Prediction
from .fitting import Fitting
from .records import LoggedRun
from .text import rises_of, table_of_run

__all__ = ["page_of_run"]

_MIB_PER_GB = 1024


def page_of_run(
    run: LoggedRun,
    told: ExplainedRun,
    prediction: Optional[Prediction],
    fitting: Optional[Fitting],
    answer: str,
    details: str,
    next_step: str,
) -> Page:
    """The page of a run.

    Args:
        answer, details, next_step: what the command prints.
    """
    charts, limits, keys = [], {}, ""
    if prediction is not None:
        charts.append(chart_of(prediction.dry_job, "as it ran"))
    if fitting is not None:
        plan = fitting.plan
        limits = {"budget": plan.budget_gb, "card": fitting.card_gb}
        keys = keys_as_yaml(fitting.job, plan)
        planned = DryJob(fitting.job.with_settings(plan.settings), fitting.device, evaluates=False)
        charts.append(
            chart_of(planned, "with the plan" if plan.fits else "with all that may change")
        )
    return Page(
        title=f"A log explained: {told.name}",
        answer=answer,
        next_step=next_step,
        job_lines=[line for line in details.splitlines() if line],
        charts=charts,
        limits_gb=limits,
        keys=keys,
        measured=_measured(run, told),
    )


def _measured(run: LoggedRun, told: ExplainedRun) -> Measured:
    range_gb = failed_gb = None
    if told.range_mib is not None:
        low, high = told.range_mib
        range_gb = low / _MIB_PER_GB, high / _MIB_PER_GB
    if told.oom is not None and run.oom is not None and run.oom.allocated is not None:
        asked = run.oom.allocated + (run.oom.tried or 0.0)
        failed_gb = told.oom.iteration or 0, asked / _MIB_PER_GB
    rises = [(i, mib / _MIB_PER_GB) for i, mib in rises_of(run.progress)]
    if rises:
        rises.append((run.progress[-1].iteration, rises[-1][1]))
    return Measured(table_of_run(told), rises, range_gb, failed_gb)
