# Copyright (c) the d2_memfit developers.
"""Prediction of the memory of all windows of a job, before it starts."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import torch
from detectron2.utils.env import seed_all_rng
from numpy.typing import NDArray

from ..common.checks import check_positive_int
from ..common.side_work import alone, no_information, unchanged_random_state
from ..common.units import GB
from ..engine.resuming import ResumableBatches, UnknownLoader
from ..engine.window import ByteCutter
from ..errors import ConfigError
from ..job import Job
from ..planner.estimates import DryJob, run_dry, steps
from .certificate import Certificate
from .foreseen_images import ForeseenImages

__all__ = ["certify"]

_COMPARED = 16  # images that are loaded for a comparison
_WORST = 10
_CHUNK = 4096  # windows that are cut at once


def certify(
    job: Job,
    iterations: Optional[int] = None,
    device: Optional[Union[str, Path]] = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Certificate:
    """Predict the memory of each window of a run, and fix the order of its data.

    Args:
        job: with its dataset, and with a cost model from ``d2-memfit plan --cost-model``.
        iterations: number of iterations; None for the whole schedule.
        device: as for :func:`~d2_memfit.planner.estimates.estimate_memory`.
        progress: called with a line for each step.

    Raises:
        ConfigError: there is no cost model, or the images are not known before the run.
    """
    cost_model = job.settings.cost_model
    if cost_model is None:
        raise ConfigError(
            "MEMFIT.COST_MODEL.BYTES is empty, but a certificate needs it to predict bytes: "
            "d2-memfit plan --cost-model writes it. If it writes none, no window is cut, and the "
            "plan already holds for the largest images"
        )
    iterations = job.cfg.SOLVER.MAX_ITER if iterations is None else iterations
    check_positive_int("--iterations", iterations)
    with unchanged_random_state(), no_information():
        dry_job = run_dry(job, device, evaluates=False)
        cutter = ByteCutter(cost_model, steps.build(job)[0], grow_after=1)
    with alone(), unchanged_random_state():
        seed_all_rng(None if job.cfg.SEED < 0 else job.cfg.SEED)
        with no_information():
            batches = _batches_of(job)
        stream, states = batches.first_state(job.ranks, int(torch.randint(2**31, ())))
        compared = states[0]["workers"][0]
        images = ForeseenImages(batches, compared, _COMPARED, dry_job.image_size)
        indices, shapes = [], []
        for rank in range(job.ranks):
            progress(f"Drawing {iterations:,} windows of rank {rank}")
            drawn = images.windows(job.geometry, rank, states[rank]["workers"], iterations)
            indices.append(drawn[0])
            shapes.append(drawn[1])
    needs, pixels = _needs(cutter, np.concatenate(shapes))
    needs, pixels = needs.reshape(job.ranks, -1), pixels.reshape(job.ranks, -1)
    worst = []
    for place in np.argsort(-needs, axis=None, kind="stable")[:_WORST]:
        rank, iteration = divmod(int(place), iterations)
        parts = cutter.quickest(shapes[rank][iteration][None]).parts(0)
        part = max(parts, key=lambda part: cutter.bytes_of(shapes[rank][iteration][part]))
        names = [images.name(i) for i in indices[rank][iteration][part]]
        worst.append((iteration, rank, names))
    alone_bytes = cutter.bytes_of(np.concatenate(shapes)[:, :, None]).max()
    node = job.cfg.MEMFIT
    least_gb = (alone_bytes / GB + node.COST_MODEL.ERROR_GB) / (1 - (node.PLAN.MARGIN or 0.0))
    return Certificate(
        needs_bytes=torch.from_numpy(np.ceil(needs.T)).long(),
        limit_bytes=cost_model.limit_bytes,
        budget_gb=node.BUDGET_GB,
        least_budget_gb=math.ceil(100 * least_gb) / 100,
        images=job.geometry.window * job.ranks,
        compared=_COMPARED,
        why_bounds=images.why_bounds,
        hours=_hours(dry_job, cutter, float(pixels.max(axis=0).sum())),
        worst=worst,
        sums=[list(numbers) for numbers in cost_model.sums],
        stream=stream,
        states=states,
    )


def _batches_of(job: Job) -> ResumableBatches:
    """The batches of one rank's loader, made in this process."""
    of_rank = job.with_settings({"SOLVER.IMS_PER_BATCH": job.geometry.images_per_batch})
    try:
        batches = ResumableBatches(of_rank.build_train_loader())
    except UnknownLoader as e:
        raise ConfigError(
            "the order of the data is known before a run only for loaders of "
            f"build_detection_train_loader, but the training loader is {e}"
        ) from e
    if batches.num_workers == 0:
        raise ConfigError(
            "DATALOADER.NUM_WORKERS is 0, so images are loaded with the trainer's random numbers, "
            "which are not known before the run. Set it to 1 or more"
        )
    return batches


def _needs(cutter: ByteCutter, shapes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Bytes of the largest micro-batch of each window, and its time in padded pixels."""
    cuts = [cutter.quickest(shapes[i : i + _CHUNK]) for i in range(0, len(shapes), _CHUNK)]
    return (
        np.concatenate([c.largest_bytes for c in cuts]),
        np.concatenate([c.pixels for c in cuts]),
    )


def _hours(dry_job: DryJob, cutter: ByteCutter, pixels: float) -> Optional[tuple[float, float]]:
    """Range of the time of a run with that many padded pixels; None where it is not known."""
    if not dry_job.device.is_gpu:
        return None
    largest = np.array([[(*dry_job.image_size, 0)] * dry_job.job.geometry.window])
    iterations = pixels / float(cutter.quickest(largest).pixels[0])
    low, high = dry_job.estimate().seconds_range
    return iterations * low / 3600, iterations * high / 3600
