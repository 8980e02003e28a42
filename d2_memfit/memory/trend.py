# Copyright (c) the d2_memfit developers.
"""Detection of steady growth in noisy measurements."""

from collections.abc import Sequence
from itertools import combinations
from statistics import median

__all__ = ["steady_growth"]

_NUM_BLOCKS = 20
_RISING_PAIRS = 0.9  # share of pairs of blocks that rise in a growing series
_NOISE_FACTOR = 5.0


def steady_growth(values: Sequence[float], at_least: float) -> float:
    """Growth per step of a series that rises from its beginning to its end.

    Each of 20 blocks is represented by its minimum, which large images do not raise. The slope is
    the median over all pairs of blocks (Theil-Sen), so single outliers do not count. A series that
    rises and then stays, as caches do, does not grow.

    Args:
        values: one for each step, at least 40.
        at_least: smallest growth over the whole series that counts.

    Returns:
        float: 0 if the series does not grow.
    """
    size = len(values) // _NUM_BLOCKS
    blocks = [min(values[i * size : (i + 1) * size]) for i in range(_NUM_BLOCKS)]
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(blocks), 2)]
    slope = median(slopes)
    residuals = [b - slope * i for i, b in enumerate(blocks)]
    noise = median(abs(r - median(residuals)) for r in residuals)
    growth = slope * _NUM_BLOCKS
    rising = sum(s > 0 for s in slopes) / len(slopes)
    last_half = blocks[-1] - blocks[_NUM_BLOCKS // 2]
    is_steady = last_half > growth / 4
    if growth < max(at_least, _NOISE_FACTOR * noise) or rising < _RISING_PAIRS or not is_steady:
        return 0.0
    return slope / size
