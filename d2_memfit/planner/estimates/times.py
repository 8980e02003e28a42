# Copyright (c) the d2_memfit developers.
"""Ranges of predicted times, from the residuals of the fit to published times.

docs/HOW_ACCURATE.md says how many of the times that were not fitted are inside.
"""

import math

__all__ = ["Range", "factor_range", "in_words", "seconds_range"]

Range = tuple[float, float]

# Errors as differences of logarithms; 90% of the fitted rows have less (commit 23d5dbdd).
# For a time: if the row's family of models, or its source, is left out of the fit.
_OF_A_TIME = 0.30
# For a ratio of two times: a share of its logarithm, from pairs of models of one family, and a
# constant if the number formats differ, from pairs with different ones.
_SHARE_OF_A_RATIO = 0.41
_OF_NUMBER_FORMATS = 0.17


def seconds_range(seconds: float) -> Range:
    """The range of a predicted time."""
    return _range(seconds, _OF_A_TIME)


def factor_range(factor: float, changes_number_format: bool = False) -> Range:
    """The range of a predicted time over that of the same job with other settings."""
    error = _SHARE_OF_A_RATIO * abs(math.log(factor))
    return _range(factor, error + _OF_NUMBER_FORMATS * changes_number_format)


def _range(value: float, error: float) -> Range:
    return value * math.exp(-error), value * math.exp(error)


def in_words(of: Range) -> str:
    """Text such as "0.75 to 0.95", or "1.00" if both ends are the same."""
    low, high = (f"{value:.2f}" for value in of)
    return low if low == high else f"{low} to {high}"
