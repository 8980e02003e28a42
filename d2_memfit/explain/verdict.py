# Copyright (c) the d2_memfit developers.
"""What a run needed, what is predicted for it, why it ended, and what would fit its card."""

import logging
import math
import os
import re
from dataclasses import dataclass, field, replace
from statistics import median
from typing import NamedTuple, Optional, Union

from ..common.side_work import no_information
from ..config.cards import PRESETS, find_card, settings_of_card
from ..errors import ConfigError, MemfitError, one_line
from ..planner.device import DeviceModel
from ..planner.estimate import DryJob, MemoryEstimate
from ..planner.plan import Plan, plan_memory
from .rebuild import Help, Rebuilt, card_of, rebuild, release_of
from .records import CONTEXT_MIB, LoggedRun, OomText
from .sources import read_runs

__all__ = ["ExplainedRun", "Explanation", "Oom", "Prediction", "Predictions", "explain"]
__all__ += ["explain_run", "is_shared", "plan_for"]

_MIB_PER_GB = 1024.0
_MUCH_MIB = 1536.0  # more outside the process's allocator than contexts alone explain
# Until 1.11 loss and ReLU kept their inputs, and cuDNN 7 took larger workspaces. Dry runs are of
# current software, so the range goes up to this share of the prediction: docs/HOW_ACCURATE.md.
_CURRENT, _OF_OLD_SOFTWARE = (1, 12), 1.2


@dataclass(frozen=True)
class Oom:
    """An out-of-memory error.

    Attributes:
        case: "at once", "after some iterations", "evaluation" or "host", as in
            docs/OUT_OF_MEMORY.md.
        iteration: the last that was logged before.
        tried_mib, total_mib: what was asked for, and the card's memory.
        held_by_others_mib: what neither the process's allocator nor the card's free memory has,
            without the least that a context takes.
        fits: whether the job fits this card when nobody else uses it.
    """

    case: str
    iteration: Optional[int]
    tried_mib: Optional[float]
    total_mib: Optional[float]
    held_by_others_mib: Optional[float]
    fits: Optional[bool]


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
    """The job of a run, its dry run, and its memory."""

    rebuilt: Rebuilt
    dry_job: DryJob
    estimate: MemoryEstimate


def explain(path: Union[str, "os.PathLike[str]"], help: Optional[Help] = None) -> Explanation:
    """Explain the trainings of a log: what they needed, what is predicted, how they ended.

    Args:
        path: a ``log.txt``, the output of a console, a notebook, or an ``OUTPUT_DIR``; "-" is
            standard input.
        help: what the log does not say.

    Raises:
        DataError: the file cannot be read, or shows no training with Detectron2.
    """
    predict, runs = Predictions(help or Help()), enumerate(read_runs(path), 1)
    return Explanation(tuple(predict(f"run {i}", run)[1] for i, run in runs))


class Predictions:
    """Explains runs, and predicts equal jobs once."""

    def __init__(self, help: Help) -> None:
        self._help = help
        self._known: dict[str, tuple[Optional[Prediction], str]] = {}

    def __call__(self, name: str, run: LoggedRun) -> tuple[Optional[Prediction], ExplainedRun]:
        of_data = run.augmentations, run.images, run.objects, run.overrides
        key = str((run.config_text, run.gpus, run.ranks, of_data, run.zoo_config, run.config_file))
        if key not in self._known:
            try:
                self._known[key] = _predict(run, self._help), ""
            except ConfigError as e:
                self._known[key] = None, _why_not(e)
        prediction, why_not = self._known[key]
        return prediction, explain_run(name, run, prediction, why_not)


def _predict(run: LoggedRun, help: Help) -> Prediction:
    """Predict a run's memory on its card, with current software."""
    try:
        with no_information(logging.ERROR):  # of Detectron2, about datasets that are not here
            rebuilt = rebuild(run, help)
            dry_job = DryJob(rebuilt.job, rebuilt.device, evaluates=False)
            return Prediction(rebuilt, dry_job, dry_job.estimate(with_range=True))
    except MemfitError:
        raise
    except Exception as e:  # of a config that this Detectron2 does not know
        why = f"its job cannot be made again ({type(e).__name__}: {one_line(e)})"
        raise ConfigError(why) from e


def _why_not(error: ConfigError) -> str:
    """Why nothing is predicted, without advice for other commands."""
    text = one_line(error)
    if missing := re.search(r"No object named '(.*?)' found in '(\w+)' registry", text):
        return f"{missing[1]}, of {missing[2]}, is not Detectron2's: its code is not here"
    return re.sub(r"^(the model of this job does not run \(.*?, in [^)]*\))\. .*", r"\1", text)


def explain_run(
    name: str, run: LoggedRun, prediction: Optional[Prediction], why_not: str = ""
) -> ExplainedRun:
    """Compare a run with its prediction."""
    seconds = [p.seconds for p in run.progress if p.seconds is not None]
    card, measured = run.gpus[0] if run.gpus else None, run.peak_mib
    told = ExplainedRun(name, card, _images_per_gpu(run), measured, ended=run.ended)
    told.oom = None if run.oom is None else _oom_of(run, run.oom, None)
    told.seconds = median(seconds[len(seconds) // 10 :]) if seconds else None
    told.assumed, told.not_rebuilt = [*run.notes], why_not
    if prediction is None:
        return told
    e = prediction.estimate
    told.range_mib = low, high = _range_mib(run, e)
    if measured is not None and (run.oom is None or measured >= low):
        told.inside = low <= measured <= high  # a run that died with less had not what it needs
    typical_gb = e.peak_allocated_gb if e.typical_gb is None else e.typical_gb
    told.images_per_gpu, told.typical_mib = e.images_per_gpu, typical_gb * _MIB_PER_GB
    told.predicted_mib = e.peak_allocated_gb * _MIB_PER_GB
    told.oom = None if run.oom is None else _oom_of(run, run.oom, told.range_mib)
    told.assumed += [*prediction.rebuilt.assumed, *e.assumptions, *e.at_least]
    return told


def _range_mib(run: LoggedRun, estimate: MemoryEstimate) -> tuple[float, float]:
    """The estimate's range, for the run's card and software."""
    low, high = (gb * _MIB_PER_GB for gb in estimate.range_gb)
    predicted, release = estimate.peak_allocated_gb * _MIB_PER_GB, release_of(run)
    if release is not None and release < _CURRENT:
        high = max(high, _OF_OLD_SOFTWARE * predicted)
    _, gigabytes = card_of(run)
    most = (gigabytes or math.inf) * _MIB_PER_GB - CONTEXT_MIB[0]
    return low, min(high, most) if predicted < most else high  # workspaces take what there is


def _images_per_gpu(run: LoggedRun) -> Optional[int]:
    """Images of a rank, as the config says; some projects have several batches, and other keys."""
    found = re.search(r"^  IMS_PER_BATCH: (\d{1,6})$", run.config_text, re.MULTILINE)
    images = int(found[1]) if found else run.overrides.get("SOLVER.IMS_PER_BATCH")
    if not isinstance(images, int) or images < 1 or "IMG_PER_BATCH" in run.config_text:
        return None
    return max(images // (run.ranks or 1), 1)


def _oom_of(run: LoggedRun, text: OomText, range_mib: Optional[tuple[float, float]]) -> Oom:
    last = run.progress[-1].iteration if run.progress else None
    iteration = last if text.iteration is None else text.iteration
    fits = _fits(text, range_mib)
    return Oom(text.case, iteration, text.tried, text.total, text.held_by_others, fits)


def is_shared(held_by_others_mib: Optional[float]) -> bool:
    """Whether others perhaps held more of a card than contexts alone explain."""
    return held_by_others_mib is not None and held_by_others_mib > _MUCH_MIB - CONTEXT_MIB[0]


def _fits(text: OomText, range_mib: Optional[tuple[float, float]]) -> Optional[bool]:
    """Whether the job fits its card when nobody else uses it."""
    if text.case == "host" or text.total is None:
        return None
    tried, held = text.tried or 0.0, text.held_by_others
    had_less = is_shared(held) or (text.free or 0.0) > tried  # a limit, as of MEMFIT.BUDGET_GB
    if (text.allocated or 0.0) + tried + CONTEXT_MIB[0] > text.total:
        return False  # more than the whole card
    if held is not None and not had_less:
        return False  # it had the whole card, and died
    if range_mib is None or text.case == "evaluation":
        return None
    (low, high), room = range_mib, text.total - CONTEXT_MIB[1]
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
    if card is None and own is not None and own.memory_gb == gigabytes:
        card = own.device
    elif card is None and gigabytes is not None and f"{gigabytes:g}GB" in PRESETS:
        card = f"{gigabytes:g}GB"
    elif card is None:
        return None
    measured, found = run.peak_mib or 0.0, find_card(card)
    if run.oom is not None and run.oom.allocated is not None:
        measured = max(measured, run.oom.allocated + (run.oom.tried or 0.0))
    more = max(measured - prediction.estimate.peak_allocated_gb * _MIB_PER_GB, 0.0)
    device = DeviceModel.load(found.device if found else "cuda")
    device = replace(device, other_tensors_mb=device.other_tensors_mb + more)
    settings = settings_of_card(card)
    job, preset = prediction.rebuilt.job.with_settings(settings), settings["MEMFIT.PRESET"]
    budget_gb = PRESETS[preset] if preset else settings["MEMFIT.BUDGET_GB"]
    allow = job.cfg.MEMFIT.PLAN.ALLOW
    return plan_memory(job, budget_gb, allow=allow, device=device, evaluates=False)
