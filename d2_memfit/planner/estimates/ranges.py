# Copyright (c) the d2_memfit developers.
"""How far the memory of a run may be from its estimate, by source, and the margin of plans.

objects
    The estimate is for the most crowded images in one batch. A run with the mean number of objects
    in each image needs less; if a model needs more with it, the range goes up to that. If the
    largest number is a guess, the range has the same width upwards.
software
    Versions of PyTorch, cuDNN and the driver use other workspaces and keep other tensors. The share
    was chosen on the published rows in docs/PUBLISHED_MEMORY.md that were used for a choice: at
    least 90% of them are in their range. The page also has the share of the other rows. On a CPU,
    which has the same software, and after a run of the same model, it is the difference between two
    runs that tests/planner/estimates/test_from_runs.py allows.
allocator
    Memory between blocks, which depends on the order of all sizes of a run: none, or twice as much
    as the allocator's model finds. A guess.
context
    287 MB (pytorch#86509) to 426 MB, reported by others, and none to 380 MB of loaded kernels (the
    whole of what pytorch#86509 measured without lazy loading). Nothing for your own device file,
    whose context is measured. On a CPU, the memory of the process in addition to its tensors: 50 to
    360 MB, as measured (devices/cpu.yaml, docs/PLANNER.md).

The worst case already includes the most objects and the memory between blocks. So the margin of a
plan covers only software and context.
"""

from dataclasses import dataclass
from typing import Optional

from ...common.units import MB
from ...job import Job
from ..device import DeviceModel, DeviceUse

__all__ = [
    "OF_MARGIN",
    "OF_TENSORS",
    "SHARE_OF_SOFTWARE",
    "Margin",
    "Widths",
    "margin_of",
    "widths_of",
]

SHARE_OF_SOFTWARE = 0.06  # of the tensors, in both directions
_OF_THE_SAME_SOFTWARE = 0.02
_CONTEXT_MB = (287, 426 + 380)
_OF_A_CPU_MB = (50, 360)

OF_TENSORS = ("objects", "software")  # the sources that concern memory allocated by PyTorch
OF_MARGIN = ("software", "context")  # the sources that a plan's margin covers

Widths = dict[str, tuple[int, int]]  # bytes below and above an estimate, by source


def widths_of(
    use: DeviceUse, device: DeviceModel, typical_bytes: Optional[int], is_guess: bool
) -> Widths:
    """Distances of both ends of an interval from an estimate, by source.

    Args:
        use: the estimated worst case.
        typical_bytes: peak allocated with the mean number of objects; None if it is not known.
        is_guess: whether the largest number of objects is a guess.
    """
    saved = use.allocated_bytes - (typical_bytes or use.allocated_bytes)
    below, above = max(saved, 0), max(-saved, 0)
    widths = {"objects": (below, max(above, below * is_guess))}
    of_software = round(_software_share(device) * use.allocated_bytes)
    between = use.outside["between blocks"] if device.is_gpu else 0
    context = use.outside["context"] + use.outside["loaded kernels"]
    return {
        **widths,
        "software": (of_software, of_software),
        "allocator": (between, between),
        "context": _of_context(device, context / MB),
    }


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
    """The margin of MEMFIT.PLAN.MARGIN, or of the widths above an estimate by ``OF_MARGIN``."""
    share: Optional[float] = job.cfg.MEMFIT.PLAN.MARGIN
    if share is not None:
        return Margin(1 / (1 - share))
    of_tensors = _software_share(device)
    of_context = _of_context(device, device.context_mb + device.kernels_mb)[1]
    outside = sum(device.outside_bytes(job.ranks).values())
    return Margin(1 + of_tensors, of_context - of_tensors * outside)
