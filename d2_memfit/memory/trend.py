# Copyright (c) the d2_memfit developers.
"""Detection of steady growth in noisy measurements."""

from collections.abc import Sequence
from itertools import combinations
from statistics import median

__all__ = ["rises_steadily"]

_NUM_BLOCKS = 20
_RISING_PAIRS = 0.9  # share of pairs of blocks that rise in a growing series


def rises_steadily(values: Sequence[float], at_least: float) -> bool:
    """Whether a series rises from its beginning to its end.

    Each of 20 blocks is represented by its minimum, which large images do not raise. The slope is
    the median over all pairs of blocks (Theil-Sen), so single outliers do not count. Two things
    rise and are not steady: caches, which stop when they are full, and steps, such as those of
    evaluations, between which nothing rises.

    Args:
        values: one for each step, at least 20.
        at_least: smallest rise over the whole series that counts.
    """
    bounds = [i * len(values) // _NUM_BLOCKS for i in range(_NUM_BLOCKS + 1)]
    blocks = [min(values[a:b]) for a, b in zip(bounds, bounds[1:])]
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(blocks), 2)]
    slope = median(slopes)
    growth = slope * _NUM_BLOCKS
    last_quarter = blocks[-1] - blocks[-1 - _NUM_BLOCKS // 4]
    return (
        growth >= at_least
        and sum(s > 0 for s in slopes) >= _RISING_PAIRS * len(slopes)
        and last_quarter > growth / 8
        and median(b - a for a, b in zip(blocks, blocks[1:])) > slope / 2
    )
