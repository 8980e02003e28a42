# Copyright (c) the d2_memfit developers.
"""The tiles of a dataset's images."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from detectron2.data import DatasetFromList
from numpy.typing import NDArray

from d2_memfit.errors import DataError
from d2_memfit.predict.tiles import Grid

from .clip import box_of, clip_annotation

__all__ = ["TiledDataset", "tiles_showing"]


def tiles_showing(grid: Grid, box: NDArray[Any], min_visible: float) -> list[int]:
    """Numbers of the tiles that show at least ``min_visible`` of a box, and more than nothing.

    For a box larger than a tile, this is the share of the most that a tile can show.

    Args:
        box: x0, y0, x1, y1 in pixels of the image [4].
    """
    across = _visible(grid.lefts, grid.size, box[0], box[2])
    down = _visible(grid.tops, grid.size, box[1], box[3])
    at_most = min(box[2] - box[0], grid.size) * min(box[3] - box[1], grid.size)
    rows = np.flatnonzero(down)
    columns = np.flatnonzero(across)
    enough = np.outer(down[rows], across[columns]) >= min_visible * at_most
    numbers = rows[:, None] * len(grid.lefts) + columns
    return numbers[enough].tolist()


def _visible(starts: NDArray[Any], size: int, low: float, high: float) -> NDArray[Any]:
    """Visible length of an interval in each tile, along one axis."""
    return np.clip(np.minimum(starts + size, high) - np.maximum(starts, low), 0, None)


class TiledDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Detectron2's dicts of the tiles of images, each made on access.

    Each has the keys of its image, the ``tile``, and the height and width of the whole image as
    ``image_size``. ``height``, ``width`` and ``annotations`` are the tile's. Images and annotations
    are stored serialized, once.

    Args:
        dicts: whole images in Detectron2's format, with ``height`` and ``width``. Crowds are left
            out, as in Detectron2.
        size, overlap: as for :class:`Grid`.
        min_visible: an object belongs to a tile that shows at least this share of its box.

    Attributes:
        num_objects: number of objects in each tile [len(self)].
    """

    def __init__(
        self, dicts: Sequence[dict[str, Any]], size: int, overlap: int, min_visible: float
    ) -> None:
        for image in dicts:
            if "height" not in image or "width" not in image:
                raise DataError(f"{image['file_name']}: its dataset gives no height and width")
        self._grids = [Grid(d["height"], d["width"], size, overlap) for d in dicts]
        self._ends = np.cumsum([len(grid) for grid in self._grids])
        self._images = DatasetFromList(
            [{k: v for k, v in d.items() if k != "annotations"} for d in dicts], copy=False
        )
        annotations: list[dict[str, Any]] = []
        pairs = []  # pairs of a tile and an annotation that it shows
        for image, grid, end in zip(dicts, self._grids, self._ends):
            for annotation in image.get("annotations", []):
                if not annotation.get("iscrowd", 0):
                    tiles = tiles_showing(grid, box_of(annotation), min_visible)
                    pairs += [(end - len(grid) + tile, len(annotations)) for tile in tiles]
                    annotations.append(annotation)
        # It cannot be empty.
        self._annotations = DatasetFromList(annotations or [{}], copy=False)
        by_tile = np.array(sorted(pairs), dtype=np.int64).reshape(-1, 2)
        self._shown = by_tile[:, 1]
        self._first_shown = np.searchsorted(by_tile[:, 0], np.arange(len(self) + 1))
        self.num_objects = np.diff(self._first_shown)

    @property
    def sizes(self) -> set[tuple[int, int]]:
        """Heights and widths of tiles."""
        return {(grid[0].height, grid[0].width) for grid in self._grids}

    @property
    def has_objects(self) -> NDArray[Any]:
        """Whether each tile has objects [len(self)]."""
        return self.num_objects > 0

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        which = int(np.searchsorted(self._ends, index, side="right"))
        grid = self._grids[which]
        tile = grid[index - int(self._ends[which]) + len(grid)]
        shown = self._shown[self._first_shown[index] : self._first_shown[index + 1]]
        clipped = (clip_annotation(self._annotations[int(i)], tile) for i in shown)
        return {
            **self._images[which],
            "image_size": (grid.height, grid.width),
            "tile": tile,
            "height": tile.height,
            "width": tile.width,
            "annotations": [annotation for annotation in clipped if annotation],
        }
