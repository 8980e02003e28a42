# Copyright (c) the d2_memfit developers.
"""What a run needed, what is predicted for it, why it ended, and what would fit its card."""

import logging
import math
import os
import re
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple, Optional, Union

from ..common.errors import ConfigError, one_line, printable
from ..common.side_work import no_information
from ..config.cards import PRESETS, find_card, settings_of_card
from ..planner.device import DeviceModel
from ..planner.estimate import DryJob, MemoryEstimate
from ..planner.plan import Plan, plan_memory
from .rebuild import Help, card_of, rebuild, release_of
from .records import CONTEXT_MIB, LoggedRun, Oom
from .sources import read_runs

__all__ = ["ExplainedRun", "Explanation", "Prediction", "explain", "explain_run", "is_shared"]
__all__ += ["plan_for", "predict_run"]

_MIB = 1024.0  # of a GB
_MUCH_MIB = 1536.0  # more outside the process's allocator than contexts alone explain
# Until 1.11 loss and ReLU kept their inputs, and cuDNN 7 took larger workspaces. Dry runs are of
# current software, so the range goes up to this share of the prediction: docs/HOW_ACCURATE.md.
_CURRENT, _OF_OLD_SOFTWARE = (1, 12), 1.2


@dataclass
class ExplainedRun:
    """A run of a log. None is not known; memory is in MiB, of the main process.

    Attributes:
        name: where it stands in the log.
        card: as the log names it.
        images_per_gpu: images in a batch of each rank.
        measured_mib: the peak of allocated memory, ``max_mem`` of the last line.
        typical_mib, predicted_mib: predicted for typical images, and for the largest.
        range_mib: the range of ``measured_mib``; ``inside`` is whether it contains it. A run that
            died with less did not show its peak: None.
        ended: "finished", "running", "out of memory", "diverged" or "error".
        seconds: of an iteration, the median.
        assumed: a line for each thing that is not known, with what was taken for it.
        not_rebuilt: why nothing is predicted; "" if something is, or was not asked for.
    """

    name: str
    card: Optional[str] = None
    images_per_gpu: Optional[int] = None
    measured_mib: Optional[float] = None
    typical_mib: Optional[float] = None
    predicted_mib: Optional[float] = None
    range_mib: Optional[tuple[float, float]] = None
    inside: Optional[bool] = None
    ended: str = "running"
    oom: Optional[Oom] = None
    seconds: Optional[float] = None
    assumed: list[str] = field(default_factory=list)
    not_rebuilt: str = ""


@dataclass(frozen=True)
class Explanation:
    """The runs of a log, in order."""

    runs: tuple[ExplainedRun, ...]


class Prediction(NamedTuple):
    """The dry runs of a run's job, its memory, and a line for each thing that the log omits."""

    dry_job: DryJob
    estimate: MemoryEstimate
    assumed: list[str]


def explain(path: Union[str, "os.PathLike[str]"], help: Optional[Help] = None) -> Explanation:
    """Explain the trainings of a log: what they needed, what is predicted, how they ended.

    Args:
        path: a ``log.txt``, the output of a console, a notebook, or an ``OUTPUT_DIR``; "-" is
            standard input.
        help: what the log does not say.

    Raises:
        DataError: the file cannot be read, or shows no training with Detectron2.
    """
    runs = enumerate(read_runs(path), 1)
    each = (explain_run(f"run {i}", run, *predict_run(run, help or Help())) for i, run in runs)
    return Explanation(tuple(each))


def predict_run(run: LoggedRun, help: Help) -> tuple[Optional[Prediction], str]:
    """Predict a run's memory on its card with current software, or say why this is not possible."""
    try:
        with no_information(logging.ERROR):  # of Detectron2, about datasets that are not here
            job, device, assumed = rebuild(run, help)
            dry_job = DryJob(job, device, evaluates=False)
            dry_job.whole()  # a project may divide a batch in ways that few images do not show
            return Prediction(dry_job, dry_job.estimate(with_range=True), assumed), ""
    except ConfigError as e:
        return None, printable(e.what or one_line(e))
    except Exception as e:  # of a config that this Detectron2 does not know
        return None, f"its job cannot be made again ({type(e).__name__}: {one_line(e)})"


def explain_run(
    name: str, run: LoggedRun, prediction: Optional[Prediction] = None, why_not: str = ""
) -> ExplainedRun:
    """Compare a run with its prediction."""
    gpu = run.gpus[0] if run.gpus else None
    result = ExplainedRun(name, gpu, _images_per_gpu(run), run.peak_mib)
    result.ended, result.assumed, result.not_rebuilt = run.ended, [*run.notes], why_not
    result.seconds = median(run.seconds[len(run.seconds) // 10 :]) if run.seconds else None
    if prediction is not None:
        e = prediction.estimate
        result.range_mib = low, high = _range_mib(run, e)
        if run.peak_mib is not None and (run.oom is None or run.peak_mib >= low):
            result.inside = low <= run.peak_mib <= high
        most, result.images_per_gpu = e.peak_allocated_gb, e.images_per_gpu
        result.predicted_mib, result.typical_mib = most * _MIB, (e.typical_gb or most) * _MIB
        result.assumed += [*prediction.assumed, *e.assumptions, *e.at_least]
    if run.oom is not None:
        result.oom = replace(run.oom, fits=_fits(run.oom, result.range_mib))
        result.oom.iteration = run.iteration if run.oom.iteration is None else run.oom.iteration
    return result


def _range_mib(run: LoggedRun, estimate: MemoryEstimate) -> tuple[float, float]:
    """The estimate's range, for the run's card and software."""
    low, high = (gb * _MIB for gb in estimate.range_gb)
    predicted, release = estimate.peak_allocated_gb * _MIB, release_of(run)
    if release is not None and release < _CURRENT:
        high = max(high, _OF_OLD_SOFTWARE * predicted)
    _, gigabytes = card_of(run)
    most = (gigabytes or math.inf) * _MIB - CONTEXT_MIB[0]
    return low, min(high, most) if predicted < most else high  # workspaces take what there is


def _images_per_gpu(run: LoggedRun) -> Optional[int]:
    """Images of a rank, as the config says."""
    found = re.search(r"^  IMS_PER_BATCH: (\d{1,6})$", run.config_text, re.MULTILINE)
    images = int(found[1]) if found else run.overrides.get("SOLVER.IMS_PER_BATCH")
    return max(images // (run.ranks or 1), 1) if isinstance(images, int) else None


def is_shared(held_by_others_mib: Optional[float]) -> bool:
    """Whether others perhaps held more of a card than contexts alone explain."""
    return held_by_others_mib is not None and held_by_others_mib > _MUCH_MIB - CONTEXT_MIB[0]


def _fits(oom: Oom, range_mib: Optional[tuple[float, float]]) -> Optional[bool]:
    """Whether the job fits its card when nobody else uses it."""
    if oom.case == "host" or oom.total_mib is None:
        return None
    tried, held = oom.tried_mib or 0.0, oom.held_by_others_mib
    is_more = (oom.allocated_mib or 0.0) + tried + CONTEXT_MIB[0] > oom.total_mib
    had_less = is_shared(held) or (oom.free_mib or 0.0) > tried  # a limit, as of MEMFIT.BUDGET_GB
    if is_more or (held is not None and not had_less):
        return False  # more than the whole card, or it had the whole card, and died
    if range_mib is None or oom.case == "evaluation":
        return None
    (low, high), room = range_mib, oom.total_mib - CONTEXT_MIB[1]
    return True if high <= room else False if low > room else None


def plan_for(run: LoggedRun, prediction: Prediction, card: Optional[str] = None) -> Optional[Plan]:
    """Plan a run's job for its card, with current software.

    What the run took in addition to the prediction, no dry run sees: it is added.

    Args:
        card: another card, as for ``--card``.

    Returns:
        None if neither the log nor ``card`` names a card.

    Raises:
        ConfigError: there is no such card.
    """
    own, gigabytes = card_of(run)
    size = f"{gigabytes or 0:g}GB"
    card = card or (own.device if own else size if size in PRESETS else None)
    if card is None:
        return None
    found, measured = find_card(card), run.peak_mib or 0.0
    if run.oom is not None and run.oom.allocated_mib is not None:
        measured = max(measured, run.oom.allocated_mib + (run.oom.tried_mib or 0.0))
    more = max(measured - prediction.estimate.peak_allocated_gb * _MIB, 0.0)
    device = replace(DeviceModel.load(found.device if found else "cuda"), other_tensors_mb=more)
    settings = settings_of_card(card)
    job, budget_gb = prediction.dry_job.job.with_settings(settings), settings["MEMFIT.BUDGET_GB"]
    budget_gb, allow = budget_gb or PRESETS[settings["MEMFIT.PRESET"]], job.cfg.MEMFIT.PLAN.ALLOW
    return plan_memory(job, budget_gb, allow=allow, device=device, evaluates=False)
