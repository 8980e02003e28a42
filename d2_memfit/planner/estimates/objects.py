# Copyright (c) the d2_memfit developers.
"""The number of objects in each image with which a job fits its budget."""

import logging
from collections.abc import Callable
from typing import Any, Optional

from ...common.units import GB
from ...errors import MemfitError
from ...job import Job, mask_bytes_per_object, objects_per_image, with_objects
from ...memory import available_host_bytes
from ...techniques import get_technique
from ..dry_run import one_line_errors
from . import steps
from .dry_job import DryJob, MostObjects, ObjectsThatFit

__all__ = ["objects_that_fit"]

logger = logging.getLogger(__name__)

_LIMIT = 1000  # objects per image: dry runs with many chunks take long
_MASKS_GB = 4  # RAM for the masks of a micro-batch, and a quarter of what is free at most
_GUESSES = 4  # dry runs with numbers between two that are known
_CLOSE = 0.05  # distance of a number that fits from one that does not, as a share of it
_BOUND_BY_OBJECTS = (*("PackedMasks", "ChunkedMatching", "ChunkedHeads"),)


def objects_that_fit(
    dry_job: DryJob, limit_bytes: int, is_within: Callable[[DryJob], bool]
) -> Optional[ObjectsThatFit]:
    """Find the most objects with which a job fits, by dry runs with as many in each image.

    More objects are taken to need no less memory.

    Args:
        dry_job: the job with its largest micro-batch.
        limit_bytes: device memory of the process that a job may need.
        is_within: whether a job fits.

    Returns:
        None if the images have no objects, or if the job does not run with other numbers of them.
    """
    batch = dry_job.job.training_batch()
    numbers = objects_per_image(batch)
    if not numbers:
        return None
    per_object = mask_bytes_per_object(batch)
    for_masks = min(_MASKS_GB * GB, available_host_bytes() / 4)
    limit = min(_LIMIT, max(int(for_masks / per_object), 1)) if per_object else _LIMIT

    def excess(dry_job: DryJob) -> int:
        """Bytes above the limit; 0 or less for a job that fits."""
        needs = dry_job.training_bytes() if is_within(dry_job) else dry_job.total_bytes()
        return needs - limit_bytes

    def try_with(settings: dict[str, Any]) -> Callable[[int], int]:
        return lambda num: excess(dry_job.with_batch(with_objects(batch, num), settings))

    try:
        own = excess(dry_job)
        known = {min(numbers) if own <= 0 else max(numbers): own}
        as_it_is = _most(try_with({}), known, limit)
    except MemfitError as e:
        logger.info("How many objects fit is not known: %s", e)
        return None
    if as_it_is.does_not_fit is None or not as_it_is.fits:  # objects do not decide
        return ObjectsThatFit(as_it_is, None, {})
    settings = _bounding_settings(dry_job.job)
    known = {as_it_is.fits: known[as_it_is.fits]}
    try:
        more = _most(try_with(settings), known, limit) if settings else as_it_is
    except MemfitError as e:
        logger.info("How many objects fit with %s is not known: %s", settings, e)
        more = as_it_is
    if more.fits <= as_it_is.fits:
        return ObjectsThatFit(as_it_is, None, {})
    return ObjectsThatFit(as_it_is, more, settings)


def _most(excess: Callable[[int], int], known: dict[int, int], limit: int) -> MostObjects:
    """The largest number that fits, with at most ``_GUESSES`` + 2 calls.

    Args:
        excess: bytes above the limit for a number; 0 or less if it fits.
        known: the same, by number. Grows.
        limit: the largest number to try, unless a larger one is known to fit.
    """
    low = max((num for num, over in known.items() if over <= 0), default=0)
    if not low:
        low, known[1] = 1, excess(1)
        if known[1] > 0:
            return MostObjects(0, 1)
    high = min((num for num, over in known.items() if over > 0), default=0)
    if not high:
        if low >= limit:
            return MostObjects(low, None)
        high, known[limit] = limit, excess(limit)
        if known[limit] <= 0:
            return MostObjects(limit, None)
    # False position. An end that stays twice loses weight (the Illinois algorithm).
    below, above, moved = float(known[low]), float(known[high]), ""
    for _ in range(_GUESSES):
        if high - low <= max(_CLOSE * low, 1):
            break
        guess = low + round((high - low) * below / (below - above))
        guess = min(max(guess, low + 1), high - 1)
        known[guess] = over = excess(guess)
        if over <= 0:
            low, below, above = guess, over, above / 2 if moved == "low" else above
            moved = "low"
        else:
            high, above, below = guess, over, below / 2 if moved == "high" else below
            moved = "high"
    return MostObjects(low, high)


def _bounding_settings(job: Job) -> dict[str, Any]:
    """Settings of the techniques that bound memory by objects, are off, and work with the model."""
    techniques = [get_technique(name) for name in _BOUND_BY_OBJECTS]
    each = [t.enabling_settings(job.cfg) for t in techniques if not t.is_on(job.cfg)]
    return {key: value for one in each if one and _builds(job, one) for key, value in one.items()}


def _builds(job: Job, settings: dict[str, Any]) -> bool:
    try:
        with one_line_errors():
            steps.build(job.with_settings(settings))
    except MemfitError:
        return False
    return True
