# Copyright (c) the d2_memfit developers.
"""Image sizes as written in a config."""

from collections.abc import Sequence
from typing import Union

__all__ = ["shorter_sides"]


def shorter_sides(value: Union[int, Sequence[int]]) -> tuple[int, ...]:
    """INPUT.MIN_SIZE_TRAIN or INPUT.MIN_SIZE_TEST, a number or several, as a tuple."""
    return (value,) if isinstance(value, int) else tuple(value)
