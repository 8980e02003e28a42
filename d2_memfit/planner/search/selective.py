# Copyright (c) the d2_memfit developers.
"""The choice for each block of a model: save, recompute or offload."""

import math
from collections.abc import Sequence
from typing import Optional

from ..estimates import DryJob
from .block_memory import blocks_of
from .knapsack import Blocks, Packing, pack
from .trials import Choice, Trials, choice_of

__all__ = ["BLOCKWISE", "most_saved", "with_blocks"]

_CHECKPOINT, _OFFLOAD = BLOCKWISE = ("ActivationCheckpointing", "ActivationOffload")
_STEP = 0.03  # of the peak: blocks are packed to save so many steps, whatever the limit is

_Found = tuple[Optional[Choice], float]


def with_blocks(
    trials: Trials, plain: Choice, allowed: Sequence[str], enough_s: float = math.inf
) -> _Found:
    """Choose the blocks that are recomputed or offloaded, so that a choice without them fits.

    Args:
        plain: a choice without techniques of ``BLOCKWISE``.
        allowed: techniques of ``BLOCKWISE`` that may be used.
        enough_s: seconds of an iteration; choices that take as many or more are not wanted.

    Returns:
        the fastest choice and its seconds; or None, and the seconds that each takes at least.
    """
    if not trials.runs(plain):
        return None, math.inf
    if trials.fits(plain):
        seconds = trials.dry_job(plain).seconds()
        return (plain if seconds < enough_s else None), seconds
    blocks = blocks_of(trials.dry_job(plain).training, trials.device)
    # The model may not run with one of them, and the host may be too small for the other.
    for tried in (allowed, *([name] for name in allowed[1:] and allowed)):
        found, seconds = _first_that_fits(trials, plain, blocks, tried, enough_s)
        if seconds < math.inf:
            break
    if _OFFLOAD in allowed:  # all of the model, of which the blocks are a part
        enough_s = min(seconds, enough_s)
        every = choice_of((*plain.names, _OFFLOAD), plain.num_images)
        if _seconds_offloaded(trials, plain) < enough_s and trials.fits(every):
            every_s = trials.dry_job(every).seconds()
            if every_s < enough_s:
                return every, every_s
    return found, seconds


def most_saved(trials: Trials, plain: Choice, allowed: Sequence[str]) -> float:
    """Bytes of a choice that its blocks, or an offload of all of the model, can save at most."""
    dry_job = trials.dry_job(plain)
    blocks = blocks_of(dry_job.training, trials.device)
    least = blocks.least_bytes(_CHECKPOINT in allowed, _OFFLOAD in allowed)
    saved = float(blocks.bytes_at.max()) - least
    offloaded = choice_of((*plain.names, _OFFLOAD), plain.num_images)
    if _OFFLOAD not in allowed or not trials.runs(offloaded):
        return saved
    return max(saved, dry_job.training_bytes() - trials.dry_job(offloaded).training_bytes())


def _seconds_offloaded(trials: Trials, plain: Choice) -> float:
    """Likely seconds if all of the model is offloaded, from the factor for few images."""
    few, offloaded = (choice_of((*plain.names, *n), trials.few) for n in ((), (_OFFLOAD,)))
    seconds = trials.dry_job(plain).seconds()
    if not trials.runs(few) or not trials.runs(offloaded):
        return seconds
    return seconds * trials.dry_job(offloaded).seconds() / trials.dry_job(few).seconds()


def _first_that_fits(
    trials: Trials, plain: Choice, blocks: Blocks, allowed: Sequence[str], enough_s: float
) -> _Found:
    """The first choice of blocks that fits, of those that save one step after another."""
    peak = float(blocks.bytes_at.max())
    too_much = trials.dry_job(plain).training_bytes() - trials.limit_bytes
    for step in range(max(math.ceil(too_much / (_STEP * peak)), 1), int(1 / _STEP)):
        packing = pack(
            blocks, peak * (1 - step * _STEP), _CHECKPOINT in allowed, _OFFLOAD in allowed
        )
        if packing is None:
            break
        seconds = _seconds(trials.dry_job(plain), blocks, packing.seconds)
        if seconds >= enough_s:
            return None, seconds
        found = _choice(plain, packing)
        if not trials.runs(found) or not trials.host_holds(found):
            break
        if trials.fits(found):
            seconds = trials.dry_job(found).seconds()
            return (found if seconds < enough_s else None), seconds
    return None, math.inf


def _seconds(dry_job: DryJob, blocks: Blocks, of_blocks_s: float) -> float:
    """Seconds of an iteration whose forward and backward of the largest micro-batch change."""
    sizes = dry_job.job.geometry.micro_batch_sizes()
    more_s = of_blocks_s - blocks.forward_s - blocks.backward_s
    return dry_job.seconds() + more_s * sum(sizes) / sizes[0]


def _choice(plain: Choice, packing: Packing) -> Choice:
    modules = {_CHECKPOINT: packing.recomputed, _OFFLOAD: packing.offloaded}
    chosen = tuple((name, blocks) for name, blocks in modules.items() if blocks)
    return choice_of([*plain.names, *dict(chosen)], plain.num_images, chosen)
