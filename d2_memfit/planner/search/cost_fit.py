# Copyright (c) the d2_memfit developers.
"""A cost model of a job's micro-batches, fitted to dry runs of the job."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...common.units import GB
from ...compat.pytorch import BatchNorm
from ...errors import ConfigError
from ...iteration import MicroBatchShape, Padding, largest_sum
from ...job import Job, resize_image, size_of
from ..device import DeviceModel
from ..dry_run import Event, Free, one_line_errors
from ..estimates import DryJob, steps
from .plan import Plan

__all__ = ["CostFit", "MeasuredMicroBatch", "fitted", "fitted_to_two", "with_cost_model"]

_SMALLER = 0.6  # scale of the largest image
_BETWEEN = 0.8
_MORE_CROWDED = 1.5
_CROWDED = 1000  # objects in images that a dataset may have in addition to the known ones
# Needed bytes, divided by those predicted from the pixels alone: if objects decide, and if they
# clearly decide, so that runs with more objects show the bytes of each object.
_IS_CROWDED, _IS_CLEARLY_CROWDED = 1.02, 1.1
_FEW = 8  # objects that are resized; others are copies
_WITHOUT_OBJECTS = 3  # number of features without objects
_ROUNDS = 20
_ERROR = "MEMFIT.COST_MODEL.ERROR_GB"

Sum = tuple[float, ...]


def with_cost_model(
    plan: Plan,
    job: Job,
    device: DeviceModel,
    allow: Sequence[str],
    progress: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Add MEMFIT.COST_MODEL to a plan. The trainer cuts windows by it.

    The plan is returned unchanged if no window is cut.

    Args:
        job: the job of the plan.
        allow: tiers that may be used. If BatchNorm is trained, other micro-batches need the tier
            "recipe".
        progress: called with a line for each dry run.

    Raises:
        ConfigError: the job's batches are not lists of dataset dicts with an "image".
    """
    planned = job.with_settings(plan.settings)
    if not plan.fits or len(planned.geometry.micro_batch_sizes()) == 1:
        progress("No cost model: no window is cut")
        return plan
    with one_line_errors():
        model = steps.build(planned)[0]
    trains_batch_norm = any(isinstance(m, BatchNorm) and m.training for m in model.modules())
    if trains_batch_norm and "recipe" not in allow:
        progress("No cost model: BatchNorm is trained on micro-batches")
        return plan
    fit = CostFit(planned, device, Padding.from_model(model), progress)
    settings = {**plan.settings, **fit.settings()}
    # A dry run has shown that the plan's largest micro-batch fits: it is not cut for an error of
    # the sums.
    with_error = fit.bytes_of(planned.training_batch()) + settings[_ERROR] * GB
    margin = min(plan.margin, 1 - with_error / (plan.budget_gb * GB))
    settings["MEMFIT.PLAN.MARGIN"] = math.floor(1e4 * margin) / 1e4
    return replace(plan, settings=settings, cost_model=fit.description())


@dataclass(frozen=True)
class MeasuredMicroBatch:
    """A measured micro-batch.

    Args:
        features: features of its images, see :data:`~d2_memfit.iteration.cost_model.FEATURES`.
        needs: bytes that the process needs.
        seconds: seconds of its forward and backward.
    """

    features: tuple[float, ...]
    needs: float
    seconds: float

    def predicted(self, sums: Sequence[Sum]) -> float:
        """The bytes that sums predict for it."""
        return float(largest_sum(sums, self.features))


class CostFit:
    """Fits the cost model: sums over features of images that predict their memory in dry runs.

    Ordinary images peak at the beginning of the backward, in proportion to their pixels. With many
    objects, the peak can be where objects are compared with anchors, or in their masks. So there
    are two sums, for ordinary and for crowded images. One is enough if objects hardly count.

    Args:
        job: gives techniques, precision and budget of the micro-batches.
        device: the device to predict for.
        padding: padding of the job's model.
        progress: called with a line for each dry run.

    Attributes:
        runs: the dry runs so far.
        sums: the sums that predict them.

    Raises:
        ConfigError: as :func:`with_cost_model`.
    """

    def __init__(
        self,
        job: Job,
        device: DeviceModel,
        padding: Padding,
        progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._job = job
        self._device = device
        self._padding = padding
        self._progress = progress
        self.runs: list[MeasuredMicroBatch] = []
        self.sums: list[Sum] = []
        with one_line_errors(lambda: job.batches.assumptions):
            largest = job.training_batch(1)
        has_image = isinstance(largest, list) and isinstance(largest[0], dict)
        if not has_image or not isinstance(largest[0].get("image"), torch.Tensor):
            raise ConfigError(
                'a cost model is of dataset dicts with an "image", and this job\'s batches are '
                f"of another kind, {type(largest).__name__}"
            )
        self._largest = largest[0]
        known = most = len(self._largest.get("instances", ()))
        few = min(1, known)
        for scale, num in ((1, 1), (1, 2), (_SMALLER, 1), (_SMALLER, 4)):
            self.dry_run(scale, [few] * num)
        self.sums = [fitted(self.runs)]
        while few < most <= max(_CROWDED, known):
            if self.dry_run(1, [most]) > _IS_CLEARLY_CROWDED:
                more = int(_MORE_CROWDED * most)
                for scale, objects in (
                    *((1, [more]), (_SMALLER, [more])),
                    *((1, [more, few]), (1, [more, more])),
                ):
                    self.dry_run(scale, objects)
                self.sums = fitted_to_two(self.runs, self.sums[0], _IS_CROWDED)
                break
            most *= 3
        self.dry_run(_BETWEEN, [known, few, few])  # a new mixture

    def settings(self) -> dict[str, Any]:
        """The config keys of the cost model and their values."""
        too_low = [run.needs - run.predicted(self.sums) for run in self.runs]
        keys = {
            "BYTES": [[float(f"{b:.6g}") for b in numbers] for numbers in self.sums],
            "ERROR_GB": round(max(0.0, *too_low) / GB, 3),
            "OVERHEAD_PIXELS": float(round(self._overhead_pixels())),
        }
        return {f"MEMFIT.COST_MODEL.{key}": value for key, value in keys.items()}

    def bytes_of(self, images: Sequence[Any]) -> float:
        """The bytes that the sums predict for a micro-batch."""
        return float(largest_sum(self.sums, self._features(images)))

    def _features(self, images: Sequence[Any]) -> tuple[float, ...]:
        shapes = np.array([(*size_of(image), len(image.get("instances", ()))) for image in images])
        return MicroBatchShape.from_images(shapes).features(self._padding)

    def description(self) -> str:
        errors = [r.predicted(self.sums) / r.needs - 1 for r in self.runs]
        return (
            "Windows are cut by predicted bytes, MEMFIT.COST_MODEL.BYTES. They predict "
            f"{len(errors)} dry runs with errors of {min(errors):+.1%} to {max(errors):+.1%}"
        )

    def dry_run(self, scale: float, objects: Sequence[int]) -> float:
        """Run one micro-batch of the largest image, scaled by ``scale``.

        Args:
            objects: number of objects of each image.

        Returns:
            float: needed bytes over the bytes predicted so far.
        """
        images = [_image(self._largest, scale, n) for n in objects]
        geometry = self._job.geometry
        settings = {
            "MEMFIT.MICRO_BATCH": len(images),
            # Gradients of another micro-batch exist already.
            "SOLVER.ACCUMULATION_STEPS": geometry.accumulation_steps + len(images),
        }
        job = self._job.with_settings(settings).with_batch(images)
        dry_job = DryJob(job, self._device, evaluates=False)
        training = dry_job.training
        dry_job.training = replace(training, events=_of_micro_batch(training.events))
        run = MeasuredMicroBatch(
            self._features(images),
            dry_job.least_bytes(),
            self._device.seconds_per_micro_batch
            + sum(self._device.seconds(training.work[phase]) for phase in ("forward", "backward")),
        )
        self.runs.append(run)
        height, width = size_of(images)
        self._progress(f"{run.needs / GB:.2f} GB: {height} x {width} pixels, objects {[*objects]}")
        return run.needs / run.predicted(self.sums) if self.sums else 1.0

    def _overhead_pixels(self) -> float:
        """Time of ordinary micro-batches that does not grow with pixels, in pixels."""
        rows = np.array([run.features[:3] for run in self.runs[:4]])
        seconds = np.array([run.seconds for run in self.runs[:4]])
        start, _, per_pixel = least_squares(rows, seconds)
        return start / per_pixel if per_pixel else 0.0


def fitted(runs: Sequence[MeasuredMicroBatch], has_objects: bool = False) -> Sum:
    """Fit a sum with the smallest relative errors, without negative terms.

    More images, pixels or objects never need less.

    Args:
        has_objects: whether it has terms for objects.
    """
    needs = np.array([run.needs for run in runs])
    rows = np.array([run.features for run in runs]) / needs[:, None]
    if not has_objects:
        rows[:, _WITHOUT_OBJECTS:] = 0
    return least_squares(rows, np.ones(len(runs)))


def fitted_to_two(runs: Sequence[MeasuredMicroBatch], first: Sum, threshold: float) -> list[Sum]:
    """Fit two sums whose maximum predicts the bytes of the runs.

    Only the second has terms for objects. A run belongs to the sum that predicts more for it. Each
    sum is fitted to its runs, in turn, until nothing changes (Magnani and Boyd, "Convex
    piecewise-linear fitting", 2009).

    Args:
        first: a sum for the runs that need little.
        threshold: ratio of need to ``first``'s prediction from which a run belongs to the second
            sum.
    """
    is_second = [run.needs > threshold * run.predicted([first]) for run in runs]
    best: tuple[float, list[Sum]] = (float("inf"), [first])
    for _ in range(_ROUNDS):
        groups = [[r for r, s in zip(runs, is_second) if s == which] for which in (False, True)]
        sums = [fitted(group, bool(i)) for i, group in enumerate(groups) if group]
        best = min(best, (max(abs(r.predicted(sums) / r.needs - 1) for r in runs), sums))
        before = is_second
        is_second = [r.predicted(sums[-1:]) > r.predicted(sums[:1]) for r in runs]
        if is_second == before or len(sums) == 1:
            break
    return best[1]


def least_squares(rows: NDArray[Any], values: NDArray[Any]) -> Sum:
    """Nonnegative coefficients, one per column, with the smallest squared error."""
    from scipy.optimize import nnls  # it takes 0.3 s

    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    found, _ = nnls(rows / scale, values)
    return tuple(float(number) for number in found / scale)


def _image(largest: dict[str, Any], scale: float, num_objects: int) -> dict[str, Any]:
    """Resize an image, and repeat or drop its objects."""
    instances = largest.get("instances")
    if instances is None:
        return resize_image(largest, scale)
    image = resize_image({**largest, "instances": instances[:_FEW]}, scale)
    few = image["instances"]
    return {**image, "instances": few[torch.arange(num_objects) % max(len(few), 1)]}


def _of_micro_batch(events: list[Event]) -> list[Event]:
    """Drop the optimizer's steps before and after, which no cut changes."""
    phases = [event.phase for event in events]
    begin = phases.index("forward")
    end = phases.index("optimizer") if "optimizer" in phases else len(events)
    gone = {id(e.allocation) for e in events[:begin] if isinstance(e, Free)}
    before = [e for e in events[:begin] if id(getattr(e, "allocation", None)) not in gone]
    return [*before, *events[begin:end]]
