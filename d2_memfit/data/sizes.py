"""Sizes of images as a config has them."""

from collections.abc import Sequence
from typing import Union

__all__ = ["shorter_sides"]


def shorter_sides(value: Union[int, Sequence[int]]) -> tuple[int, ...]:
    """INPUT.MIN_SIZE_TRAIN or INPUT.MIN_SIZE_TEST: Detectron2 takes one number, or several."""
    return (value,) if isinstance(value, int) else tuple(value)
