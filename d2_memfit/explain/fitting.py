# Copyright (c) the d2_memfit developers.
"""A plan for a logged run's card, which starts from what the log has measured."""

from dataclasses import replace
from typing import NamedTuple, Optional

from ..config.cards import PRESETS, find_card, settings_of_card
from ..job import TYPICAL_SIZE, Job
from ..planner.device import DeviceModel
from ..planner.search import Plan, plan_memory
from .explanation import Prediction
from .rebuild import card_of
from .records import LoggedRun

__all__ = ["Fitting", "plan_for"]

_LONG = 200  # iterations after which most batches have had an image of the largest scale
_MIB_PER_GB = 1024


class Fitting(NamedTuple):
    """A plan, and the job, device and card that it is for."""

    plan: Plan
    job: Job
    device: DeviceModel
    card_gb: float


def plan_for(
    run: LoggedRun, prediction: Prediction, card: Optional[str] = None
) -> Optional[Fitting]:
    """Plan a run's job for its card, with current software.

    Args:
        card: another card, as for ``--card``.

    Returns:
        The plan, and what it is for; None if neither the log nor ``card`` names a card.

    Raises:
        ConfigError: there is no such card.
    """
    own, gigabytes = card_of(run)
    if card is not None:
        settings, own = settings_of_card(card), find_card(card)
    elif own is not None and own.memory_gb == gigabytes:
        settings = own.settings
    elif gigabytes is not None and f"{gigabytes:g}GB" in PRESETS:
        settings = settings_of_card(f"{gigabytes:g}GB")
    else:
        return None
    device = DeviceModel.load(own.device if own else "cuda")
    job, more_mib = _as_measured(run, prediction)
    device = replace(device, other_tensors_mb=device.other_tensors_mb + more_mib)
    job, preset = job.with_settings(settings), settings["MEMFIT.PRESET"]
    plan = plan_memory(
        job,
        PRESETS[preset] if preset else settings["MEMFIT.BUDGET_GB"],
        allow=job.cfg.MEMFIT.PLAN.ALLOW,
        device=device,
        evaluates=False,
    )
    return Fitting(plan, job, device, own.memory_gb if own else float(preset.rstrip("GB")))


def _as_measured(run: LoggedRun, prediction: Prediction) -> tuple[Job, float]:
    """The job with images of the shape that its peak tells, and MiB that no dry run has seen."""
    job, measured = prediction.rebuilt.job, run.peak_mib or 0.0
    if run.oom is not None and run.oom.allocated is not None:
        measured = max(measured, run.oom.allocated + (run.oom.tried or 0.0))
    worst = prediction.estimate.peak_allocated_gb * _MIB_PER_GB
    of_shape = prediction.estimate.widths["shape"][0] * _MIB_PER_GB
    is_told = run.oom is None and bool(run.progress) and run.progress[-1].iteration >= _LONG
    if of_shape and is_told and 0 < measured < worst:
        share = min((worst - measured) / of_shape, 1.0)
        # Between the shape that makes the most pixels, such as 3 to 5, and a square.
        shorter, longer = sorted(prediction.estimate.image_size)
        height = TYPICAL_SIZE[0]
        width = height * (longer / shorter * (1 - share) + share)
        job = job.with_image_size((height, round(width)))
    return job, max(measured - worst, 0.0)
