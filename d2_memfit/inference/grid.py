# Copyright (c) the d2_memfit developers.
"""The positions of an image's tiles."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Grid", "Tile"]


class Tile(NamedTuple):
    """A part of an image: columns ``x0`` up to ``x1``, rows ``y0`` up to ``y1``, ends excluded."""

    x0: int
    y0: int
    x1: int
    y1: int

    @property
    def width(self) -> int:
        return self.x1 - self.x0

    @property
    def height(self) -> int:
        return self.y1 - self.y0


class Grid:
    """The tiles of one image, row by row: ``grid[i]`` for ``i`` below ``len(grid)``.

    All have the same size. The last tiles of a row and a column are moved back into the image, so
    they overlap more, like SAHI's slices. An image smaller than a tile is one tile.

    Args:
        height, width: height and width of the image in pixels.
        size: height and width of a tile in pixels.
        overlap: pixels that neighbouring tiles share, at least.
    """

    def __init__(self, height: int, width: int, size: int, overlap: int) -> None:
        self.height = height
        self.width = width
        self.tops = _starts(height, size, overlap)
        self.lefts = _starts(width, size, overlap)
        self.size = size

    def __len__(self) -> int:
        return len(self.tops) * len(self.lefts)

    def __getitem__(self, index: int) -> Tile:
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} tiles, and none has the number {index}")
        row, column = divmod(index, len(self.lefts))
        y = int(self.tops[row])
        x = int(self.lefts[column])
        return Tile(x, y, min(x + self.size, self.width), min(y + self.size, self.height))


def _starts(length: int, size: int, overlap: int) -> NDArray[Any]:
    last = max(length - size, 0)
    return np.append(np.arange(0, last, size - overlap), last)
