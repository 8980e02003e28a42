# Copyright (c) the d2_memfit developers.
"""What a run needed, what is predicted for it, why it died, and whether it could have fitted."""

import logging
import re
from dataclasses import dataclass, field
from statistics import median
from typing import Optional

from ..common.side_work import no_information
from ..errors import ConfigError, MemfitError, one_line
from ..planner.estimates import DryJob, MemoryEstimate
from ..planner.stand_ins import as_in_pytorch
from .rebuild import Help, Rebuilt, card_of, rebuild
from .records import LoggedRun, OomText

__all__ = ["ExplainedRun", "Oom", "Prediction", "explain_run", "is_shared", "predict_run"]

_MIB_PER_GB = 1024.0
# What the context, kernels and other libraries of one process take: ranges.py has the sources.
_CONTEXT_MIB = (287.0, 426.0 + 380.0)
_MUCH_MIB = 1536.0  # more outside the process's allocator than contexts alone explain


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


@dataclass(frozen=True)
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
        ended: "finished", "running", "out of memory" or "error".
        seconds: of an iteration, the median; predicted_s: its range for the largest images.
        assumed: a line for each thing that is not known, with what was taken for it.
        not_rebuilt: why nothing is predicted; "" if something is.
    """

    name: str
    card: Optional[str]
    images_per_gpu: Optional[int]
    measured_mib: Optional[float]
    typical_mib: Optional[float]
    predicted_mib: Optional[float]
    range_mib: Optional[tuple[float, float]]
    inside: Optional[bool]
    ended: str
    oom: Optional[Oom]
    seconds: Optional[float]
    predicted_s: Optional[tuple[float, float]]
    assumed: list[str] = field(default_factory=list)
    not_rebuilt: str = ""


@dataclass(frozen=True)
class Prediction:
    """The job of a run, and its memory."""

    rebuilt: Rebuilt
    dry_job: DryJob
    estimate: MemoryEstimate

    @property
    def range_mib(self) -> tuple[float, float]:
        low, high = self.estimate.range_gb
        return low * _MIB_PER_GB, high * _MIB_PER_GB


def predict_run(run: LoggedRun, help: Help) -> Prediction:
    """Predict a run's memory and time, on its card with its software.

    Raises:
        ConfigError: its job cannot be made again.
    """
    try:
        with no_information(logging.ERROR):  # of Detectron2, about datasets that are not here
            rebuilt = rebuild(run, help)
            with as_in_pytorch(rebuilt.pytorch or (2, 0)):
                dry_job = DryJob(rebuilt.job, rebuilt.device, evaluates=False)
                return Prediction(rebuilt, dry_job, dry_job.estimate(with_range=True))
    except MemfitError:
        raise
    except Exception as e:  # of a config that this Detectron2 does not know
        raise ConfigError(
            f"its job cannot be made again ({type(e).__name__}: {one_line(e)})"
        ) from e


def explain_run(
    name: str, run: LoggedRun, prediction: Optional[Prediction], why_not: str = ""
) -> ExplainedRun:
    """Compare a run with its prediction."""
    measured = run.peak_mib
    predicted = typical = range_mib = predicted_s = None
    per_gpu = _images_per_gpu(run)
    assumed = list(run.notes)
    if prediction is not None:
        e = prediction.estimate
        predicted = e.peak_allocated_gb * _MIB_PER_GB
        typical = predicted if e.typical_gb is None else e.typical_gb * _MIB_PER_GB
        range_mib = prediction.range_mib
        _, gigabytes = card_of(run)
        if gigabytes is not None:  # workspaces take no more than there is
            most = gigabytes * _MIB_PER_GB - _CONTEXT_MIB[0]
            if predicted < most:
                range_mib = range_mib[0], min(range_mib[1], most)
        per_gpu = e.images_per_gpu
        if prediction.rebuilt.device.device_name:
            predicted_s = e.seconds_range
        assumed += [*prediction.rebuilt.assumed, *e.assumptions, *e.at_least]
    inside = None
    if measured is not None and range_mib is not None:
        inside = range_mib[0] <= measured <= range_mib[1]
        if run.oom is not None and measured < range_mib[0]:
            inside = None  # it died before it had what it needs
    return ExplainedRun(
        name=name,
        card=run.gpus[0] if run.gpus else None,
        images_per_gpu=per_gpu,
        measured_mib=measured,
        typical_mib=typical,
        predicted_mib=predicted,
        range_mib=range_mib,
        inside=inside,
        ended=run.ended,
        oom=_oom_of(run, range_mib),
        seconds=_median_seconds(run),
        predicted_s=predicted_s,
        assumed=assumed,
        not_rebuilt=why_not,
    )


def _images_per_gpu(run: LoggedRun) -> Optional[int]:
    """Images of a rank, as the config says; some projects have several batches, and other keys."""
    found = re.search(r"^  IMS_PER_BATCH: (\d{1,6})$", run.config_text, re.MULTILINE)
    images = int(found[1]) if found else run.overrides.get("SOLVER.IMS_PER_BATCH")
    if not isinstance(images, int) or images < 1 or "IMG_PER_BATCH" in run.config_text:
        return None
    return max(images // (run.ranks or 1), 1)


def _median_seconds(run: LoggedRun) -> Optional[float]:
    seconds = [p.seconds for p in run.progress if p.seconds is not None]
    return median(seconds[len(seconds) // 10 :]) if seconds else None


def _oom_of(run: LoggedRun, range_mib: Optional[tuple[float, float]]) -> Optional[Oom]:
    if run.oom is None:
        return None
    text, held = run.oom, held_by_others(run.oom)
    iteration = text.iteration
    if iteration is None and run.progress:
        iteration = run.progress[-1].iteration
    fits = _fits(text, held, range_mib)
    return Oom(text.case, iteration, text.tried, text.total, held, fits)


def held_by_others(text: OomText) -> Optional[float]:
    """MiB that other processes hold, at least; None if the message does not say."""
    if text.total is None or text.free is None:
        return None
    own = text.process
    if own is None:
        if text.held is None:
            return None
        own = text.held + _CONTEXT_MIB[0]
    return max(text.total - text.free - own, 0.0)


def is_shared(held_by_others_mib: Optional[float]) -> bool:
    """Whether others held more of a card than contexts alone explain."""
    return held_by_others_mib is not None and held_by_others_mib > _MUCH_MIB - _CONTEXT_MIB[0]


def _fits(
    text: OomText, held: Optional[float], range_mib: Optional[tuple[float, float]]
) -> Optional[bool]:
    """Whether the job fits its card when nobody else uses it."""
    if text.case == "host" or text.total is None:
        return None
    tried = text.tried or 0.0
    had_less = is_shared(held) or (text.free or 0.0) > tried  # a limit, as of MEMFIT.BUDGET_GB
    if (text.allocated or 0.0) + tried + _CONTEXT_MIB[0] > text.total:
        return False  # more than the whole card
    if held is not None and not had_less:
        return False  # it had the whole card, and died
    if range_mib is None or text.case == "evaluation":
        return None
    room = text.total - _CONTEXT_MIB[1]
    low, high = range_mib
    return True if high <= room else False if low > room else None
