# Copyright (c) the d2_memfit developers.
"""How far the memory of a run may be from its estimate, by source, and the margin of plans.

The estimate is for the largest images, the most objects and the usual workspaces.

shape
    Nothing tells the shape of the photographs: from square to 1 to 2. ``ResizeShortestEdge`` with
    its usual limits makes 0.6 times the pixels of a square photograph that it makes of one of 3 to
    5. A typical one has 3 to 4.
objects
    A run with the mean number of objects in each image needs less, and so does one with few
    proposals on each object. If a model needs more with the mean number, the range goes up to that.
    If the largest number is a guess, it has the same width upwards.
workspaces
    What convolutions take while they run: nothing, or the most of all algorithms that are known
    (:data:`~d2_memfit.planner.device.WORKSPACES`).
card
    If nothing tells the card: cuDNN may choose any algorithm that the card's memory allows. The
    share was chosen on one run that needed more (docs/HOW_ACCURATE.md).
release
    If nothing tells PyTorch's release: gradients exist in each forward until 2.0.
software
    Versions of PyTorch, cuDNN and the driver keep other tensors. The share was chosen on the
    published rows in docs/HOW_ACCURATE.md that were used for a choice: at least 90% of them are
    in their range. The page also has the share of the other rows. On a CPU, which has the same
    software, and after a run of the same model, it is the difference between two runs that
    tests/planner/estimates/test_from_runs.py allows.
allocator
    Memory between blocks, which depends on the order of all sizes of a run: none, or twice as much
    as the allocator's model finds. A guess.
context
    287 MB (pytorch#86509) to 426 MB, reported by others, and none to 380 MB of loaded kernels (the
    whole of what pytorch#86509 measured without lazy loading). Nothing for your own device file,
    whose context is measured. On a CPU, the memory of the process in addition to its tensors: 50 to
    360 MB, as measured (docs/HOW_ACCURATE.md).

Below the estimate, shape, objects and workspaces are those of one batch, the least: their widths
add up. All others are independent of each other: the squares of their widths add up.

The worst case already includes the largest shape, the most objects and the memory between blocks,
and PyTorch does without a workspace that is not there. So the margin of a plan covers only software
and context.

One run in twenty is taken to exceed an end of its range, and what jobs need to be normally
distributed on both sides of the typical case. docs/HOW_ACCURATE.md compares that with runs.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple, Optional

from ...common.units import MB
from ...job import Job
from ..device import DeviceModel, DeviceUse

__all__ = [
    "OF_MARGIN",
    "OF_TENSORS",
    "SHARE_OF_SOFTWARE",
    "Margin",
    "Others",
    "Widths",
    "chance_of_need",
    "chance_to_fit",
    "margin_of",
    "range_of",
    "widths_of",
]

SHARE_OF_SOFTWARE = 0.06  # of the tensors, in both directions
_OF_THE_SAME_SOFTWARE = 0.02
_OF_AN_UNKNOWN_CARD = 0.5  # of the tensors, upwards
_CONTEXT_MB = (287, 426 + 380)
_OF_A_CPU_MB = (50, 360)

# The sources that concern memory allocated by PyTorch.
_OF_BATCH = ("shape", "objects", "workspaces")
OF_TENSORS = (*_OF_BATCH, "card", "release", "software")
OF_MARGIN = ("software", "context")  # the sources that a plan's margin covers

_NORMAL = NormalDist()
_AT_THE_END = _NORMAL.inv_cdf(0.95)  # standard deviations

Widths = dict[str, tuple[int, int]]  # bytes below and above an estimate, by source


class Others(NamedTuple):
    """Peaks of allocated memory, in bytes, in other cases than the estimate's; None if not known.

    Attributes:
        typical: photographs of a typical shape with the mean number of objects.
        smallest: photographs of the shape that has the fewest pixels, if any shape is possible. The
            next three are in this shape, too.
        mean_objects: the mean number of objects in each image.
        few_on_objects: the same, and few proposals on each.
        no_workspaces: the same, and convolutions without workspaces.
        most_workspaces: the estimate's batch, and the largest workspaces.
        kept_gradients: the same with gradients in each forward, if PyTorch's release is not known.
    """

    typical: Optional[int] = None
    smallest: Optional[int] = None
    mean_objects: Optional[int] = None
    few_on_objects: Optional[int] = None
    no_workspaces: Optional[int] = None
    most_workspaces: Optional[int] = None
    kept_gradients: Optional[int] = None


def widths_of(use: DeviceUse, device: DeviceModel, others: Others, is_guess: bool) -> Widths:
    """Distances of both ends of an interval from an estimate, by source.

    Args:
        use: the estimated worst case.
        is_guess: whether the largest number of objects is a guess.
    """
    worst = use.allocated_bytes
    smallest = _first(others.smallest, worst)
    mean = _first(others.mean_objects, smallest)
    few = _first(others.few_on_objects, mean)
    without = _first(others.no_workspaces, few)
    of_mean = smallest - mean
    of_software = round(_software_share(device) * worst)
    between = use.outside["between blocks"] if device.is_gpu else 0
    context = use.outside["context"] + use.outside["loaded kernels"]
    return {
        "shape": (max(worst - smallest, 0), 0),
        "objects": (max(smallest - min(few, mean), 0), max(-of_mean, of_mean * is_guess, 0)),
        "workspaces": (
            max(few - without, 0),
            max(_first(others.most_workspaces, worst) - worst, 0),
        ),
        "card": (0, 0 if device.card_is_known else round(_OF_AN_UNKNOWN_CARD * worst)),
        "release": (0, max(_first(others.kept_gradients, worst) - worst, 0)),
        "software": (of_software, of_software),
        "allocator": (between, between),
        "context": _of_context(device, context / MB),
    }


def _first(num_bytes: Optional[int], other: int) -> int:
    return other if num_bytes is None else num_bytes


def range_of(
    value: float, widths: Mapping[str, tuple[float, float]], sources: Iterable[str]
) -> tuple[float, float]:
    """Both ends of the interval around a value, in the unit of the widths."""
    of_batch = sum(widths[source][0] for source in _OF_BATCH)
    others = (widths[source][0] for source in sources if source not in _OF_BATCH)
    below = math.hypot(of_batch, *others)
    above = math.hypot(*(widths[source][1] for source in sources))
    return value - below, value + above


def chance_of_need(
    limit: float, value: float, typical: float, widths: Mapping[str, tuple[float, float]]
) -> float:
    """The chance that a job needs no more than a limit of the device.

    Args:
        value: what the process takes in the estimated worst case, in the limit's unit.
        typical: what it takes in a typical case.
        widths: in the same unit.
    """
    taken = {source: (widths[source][0], 0.0) for source in ("workspaces", "card")}
    low, high = range_of(value, {**widths, **taken}, (*OF_TENSORS, "context"))
    to_the_end = high - typical if limit > typical else typical - low
    if to_the_end <= 0:
        return float(limit >= typical)
    return _NORMAL.cdf(_AT_THE_END * (limit - typical) / to_the_end)


def _software_share(device: DeviceModel) -> float:
    is_the_same = device.tensors_are_measured or not device.is_gpu
    return _OF_THE_SAME_SOFTWARE if is_the_same else SHARE_OF_SOFTWARE


def _of_context(device: DeviceModel, context_mb: float) -> tuple[int, int]:
    """Bytes below and above the context of a GPU, or above the tensors of a CPU's process."""
    least, most = _CONTEXT_MB
    is_measured = device.context_is_measured
    if not device.is_gpu:
        least, most = _OF_A_CPU_MB
        context_mb, is_measured = device.other_tensors_mb, device.tensors_are_measured
    if is_measured:
        return 0, 0
    return max(round((context_mb - least) * MB), 0), max(round((most - context_mb) * MB), 0)


@dataclass(frozen=True)
class Margin:
    """The margin of a plan: a budget is ``factor`` x the job's limit + ``more_bytes``."""

    factor: float
    more_bytes: float = 0.0

    def limit_bytes(self, budget_bytes: float) -> int:
        """The most that a job may need within a budget."""
        return int((budget_bytes - self.more_bytes) / self.factor)

    def budget_bytes(self, limit_bytes: float) -> float:
        """The smallest budget for a job that needs this many bytes."""
        return self.factor * limit_bytes + self.more_bytes


def margin_of(job: Job, device: DeviceModel) -> Margin:
    """The margin of MEMFIT.PLAN.MARGIN, or of the widths above an estimate by ``OF_MARGIN``.

    The widths are those that a run exceeds with a chance of MEMFIT.PLAN.RISK.
    """
    share: Optional[float] = job.cfg.MEMFIT.PLAN.MARGIN
    if share is not None:
        return Margin(1 / (1 - share))
    widths = _NORMAL.inv_cdf(1 - job.cfg.MEMFIT.PLAN.RISK) / _AT_THE_END
    of_tensors = widths * _software_share(device)
    outside = sum(device.outside_bytes(job.ranks).values())
    return Margin(1 + of_tensors, widths * _margin_of_context(device) - of_tensors * outside)


def chance_to_fit(job: Job, device: DeviceModel, needs_bytes: float, budget_bytes: float) -> float:
    """The chance that a job runs in a budget, by the widths of ``OF_MARGIN``.

    Args:
        needs_bytes: the estimate of the process.
    """
    outside = sum(device.outside_bytes(job.ranks).values())
    width = _software_share(device) * (needs_bytes - outside) + _margin_of_context(device)
    return _NORMAL.cdf(_AT_THE_END * (budget_bytes - needs_bytes) / max(width, 1))


def _margin_of_context(device: DeviceModel) -> int:
    return _of_context(device, device.context_mb + device.kernels_mb)[1]
