# Copyright (c) the d2_memfit developers.
"""The tiles of a dataset's images, and the sampler that draws them in training."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import numpy as np
import torch
from detectron2.data import DatasetFromList
from detectron2.utils import comm
from numpy.typing import NDArray

from d2_memfit.errors import DataError
from d2_memfit.predict.tiles import Grid

from .clip import box_of, clip_annotation

__all__ = ["BalancedTileSampler", "TiledDataset", "tiles_showing"]


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


class BalancedTileSampler(torch.utils.data.Sampler[int]):
    """An endless stream of tile numbers, of which a given share has objects.

    Tiles with and without objects are each drawn in a random order, all of them before one comes
    again. All ranks draw the same numbers and take turns. If all tiles or none have objects, the
    share has no effect.

    Args:
        has_objects: one value per tile [n].
        object_share: from 0 to 1.
        seed: the same on all ranks; by default they agree on one.
    """

    def __init__(
        self, has_objects: NDArray[Any], object_share: float, seed: Optional[int] = None
    ) -> None:
        self._kinds = np.flatnonzero(~has_objects), np.flatnonzero(has_objects)
        self._share = object_share
        self._seed = comm.shared_random_seed() if seed is None else seed
        self._rank, self._world_size = comm.get_rank(), comm.get_world_size()
        if not all(map(len, self._kinds)):
            self._share = float(has_objects.any())

    def __iter__(self) -> Iterator[int]:
        yield from itertools.islice(self._draw(), self._rank, None, self._world_size)

    def _draw(self) -> Iterator[int]:
        rng = torch.Generator().manual_seed(int(self._seed))
        kinds = [_in_random_order(kind, rng) for kind in self._kinds]
        while True:
            yield next(kinds[torch.rand((), generator=rng).item() < self._share])


def _in_random_order(numbers: NDArray[Any], rng: torch.Generator) -> Iterator[int]:
    while True:
        for i in torch.randperm(len(numbers), generator=rng):
            yield int(numbers[i])
