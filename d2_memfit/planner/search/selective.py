# Copyright (c) the d2_memfit developers.
"""The choice for each block of a model: save, recompute or offload."""

import math
from collections.abc import Iterable, Sequence
from typing import Optional

from .block_memory import blocks_of
from .knapsack import Packing, pack
from .trials import Choice, Trials, choice_of

__all__ = ["BLOCKWISE", "with_best_blocks"]

_CHECKPOINT, _OFFLOAD = BLOCKWISE = ("ActivationCheckpointing", "ActivationOffload")
_WORTH_IT = 0.995  # share of the time; smaller gains are within the error of the prediction
_DEAR = 0.9  # share of the time; with a smaller gain, a job without techniques gets none for speed
_STEP = 0.03  # of the peak: blocks are packed to save so many steps, whatever the budget is


def with_best_blocks(
    trials: Trials, choice: Choice, sizes: Iterable[int], allowed: Sequence[str]
) -> Choice:
    """Choose the blocks that are recomputed or offloaded one by one, so that the choice fits.

    The choice itself is returned if this is not faster.

    Args:
        sizes: of micro-batches that may be used.
        allowed: techniques that may be used, of ``BLOCKWISE``, if they change something.
    """
    best, best_seconds = choice, trials.dry_job(choice).seconds()
    if not choice.names:
        best_seconds *= _DEAR
    ordered = sorted(sizes)
    if not allowed or (choice.num_images == ordered[-1] and not _blocks_in(choice)):
        return choice
    larger = [n for n in ordered if n >= choice.num_images]
    # Without blocks, smaller micro-batches are only slower.
    smaller = [n for n in reversed(ordered) if n < choice.num_images and _blocks_in(choice)]
    for tried in (larger, smaller):
        for num_images in tried:
            found = _fastest_blocks(trials, choice, num_images, allowed, best_seconds)
            if found is None and _CHECKPOINT in allowed and _OFFLOAD in allowed:
                found = _fastest_blocks(trials, choice, num_images, [_CHECKPOINT], best_seconds)
            if found is not None:
                best, best_seconds = found, trials.dry_job(found).seconds()
            elif num_images != choice.num_images:
                break
    return best


def _blocks_in(choice: Choice) -> bool:
    return any(name in BLOCKWISE for name in choice.names)


def _fastest_blocks(
    trials: Trials, choice: Choice, num_images: int, allowed: Sequence[str], seconds: float
) -> Optional[Choice]:
    """The first choice of blocks that fits, if it takes less than ``seconds``.

    Choices save one step of the peak after another. They do not depend on the limit, so that more
    memory makes none slower.
    """
    names = [name for name in choice.names if name not in BLOCKWISE]
    plain = choice_of(names, num_images)
    likely_s = trials.interpolated_seconds(names, num_images)
    if (likely_s is not None and likely_s >= _WORTH_IT * seconds) or not trials.runs(plain):
        return None
    dry_job = trials.dry_job(plain)
    blocks = blocks_of(dry_job.training, trials.device)
    allowed = [name for name in allowed if trials.helps(name)]
    peak = float(blocks.bytes_at.max())
    too_much = dry_job.training_bytes() - trials.limit_bytes
    sizes = dry_job.job.geometry.micro_batch_sizes()
    for step in range(max(math.ceil(too_much / (_STEP * peak)), 1), int(1 / _STEP)):
        packing = pack(
            blocks, peak * (1 - step * _STEP), _CHECKPOINT in allowed, _OFFLOAD in allowed
        )
        if packing is None:
            return None
        more = packing.seconds - blocks.forward_s - blocks.backward_s
        if dry_job.seconds() + more * sum(sizes) / sizes[0] >= _WORTH_IT * seconds:
            return None
        found = _choice(names, num_images, packing)
        if not trials.runs(found) or not trials.host_holds(found):
            return None
        if trials.fits(found):
            return found if trials.dry_job(found).seconds() < _WORTH_IT * seconds else None
    return None


def _choice(names: Sequence[str], num_images: int, packing: Packing) -> Choice:
    modules = {_CHECKPOINT: packing.recomputed, _OFFLOAD: packing.offloaded}
    chosen = tuple((name, blocks) for name, blocks in modules.items() if blocks)
    return choice_of([*names, *dict(chosen)], num_images, chosen)
