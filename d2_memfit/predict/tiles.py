# Copyright (c) the d2_memfit developers.
"""The tiles of an image, and the merging of objects that they cut apart or show twice."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

import numpy as np
from detectron2.structures import Instances
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

from ..common.errors import DataError

__all__ = ["Detection", "Grid", "Rle", "SeamMerger", "Tile", "found_in_tile", "move", "to_coco"]

Rle = dict[str, Any]  # {"size": [height, width], "counts": bytes, str or list of int}


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
        self.height, self.width, self.size = height, width, size
        self.tops, self.lefts = (
            np.append(np.arange(0, max(length - size, 0), size - overlap), max(length - size, 0))
            for length in (height, width)
        )

    def __len__(self) -> int:
        return len(self.tops) * len(self.lefts)

    def __iter__(self) -> Iterator[Tile]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Tile:
        row, column = divmod(index, len(self.lefts))
        y, x = int(self.tops[row]), int(self.lefts[column])
        return Tile(x, y, min(x + self.size, self.width), min(y + self.size, self.height))


@dataclass
class Detection:
    """A detected object.

    Attributes:
        box: x0, y0, x1, y1 in pixels of the image [4].
        score: 0 to 1.
        category: the model's number, from 0.
        mask: run-length encoded mask; None for models without masks. Its frame is the tile, and
            after merging the image.
    """

    box: NDArray[Any]
    score: float
    category: int
    mask: Optional[Rle] = None


def found_in_tile(instances: Instances, tile: Tile) -> list[Detection]:
    """The detections of a model that got one tile."""
    instances = instances.to("cpu")
    boxes = instances.pred_boxes.tensor.double().numpy() + [tile.x0, tile.y0] * 2
    masks: list[Optional[Rle]] = [None] * len(boxes)
    if instances.has("pred_masks"):
        pixels = [mask.numpy().astype(np.uint8) for mask in instances.pred_masks]
        masks = [coco_mask.encode(np.asfortranarray(p)) for p in pixels]
    rows = zip(boxes, instances.scores.tolist(), instances.pred_classes.tolist(), masks)
    return [Detection(*row) for row in rows]


def to_coco(detection: Detection, image_id: int) -> dict[str, Any]:
    """Convert a merged detection to COCO's results format, with the model's class as category."""
    x0, y0, x1, y1 = detection.box.tolist()
    result = {
        "image_id": image_id,
        "category_id": detection.category,
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "score": detection.score,
    }
    if detection.mask is not None:
        counts = detection.mask["counts"].decode("utf-8")
        result["segmentation"] = {"size": list(detection.mask["size"]), "counts": counts}
    return result


@dataclass(eq=False)
class _Part:
    """The part of an object that one tile shows."""

    found: Detection
    tile: Tile
    object: "list[_Part]" = field(default_factory=list)  # all known parts of it

    def __post_init__(self) -> None:
        self.object.append(self)

    def unite(self, other: "_Part") -> None:
        if other.object is not self.object:
            self.object += other.object
            for part in other.object:
                part.object = self.object

    def mask_in(self, frame: Tile) -> Rle:
        assert self.found.mask is not None
        x, y = self.tile.x0 - frame.x0, self.tile.y0 - frame.y0
        return move(self.found.mask, x, y, frame.height, frame.width)


class SeamMerger:
    """Finds the detections in overlapping tiles that are one object.

    Where two tiles overlap, they show the same pixels. Two detections of one category are one
    object if they agree in that region: the IoU of their masks there, or of their boxes, is at
    least ``merge_iou``. A detection that a tile's border cuts may agree with none in the other
    tile. It is then part of a detection there that covers this share of it. So objects larger than
    a tile are joined part by part. Neighbouring objects, and small objects on large ones, are kept.

    For an object that is whole in each of its tiles, the detection with the highest score is kept.
    A cut object is the union of its parts, with their highest score.

    Detections of one tile are not compared, because the model's non-maximum suppression does that.
    They are one object if both are parts of one in another tile. If several agree, such as two
    objects that both fill a narrow overlap, those with the most similar boxes are joined.

    Args:
        grid: tiles must be added in its order.
        merge_iou: 0 to 1.
    """

    # Share of the tile's size. A box that ends this close to its border may continue beyond it.
    _NEAR = 0.01
    # A box that has this share of the area of all parts together is the object's box.
    _ALMOST_ALL = 0.9

    def __init__(self, grid: Grid, merge_iou: float) -> None:
        self._image = Tile(0, 0, grid.width, grid.height)
        self._merge_iou = merge_iou
        self._parts: dict[Tile, list[_Part]] = {}  # parts of tiles that may overlap with later ones

    def add(self, tile: Tile, detections: Sequence[Detection]) -> Iterator[Detection]:
        """Add the detections of the next tile; yield objects that no later tile can show."""
        yield from self._finish(tile.y0)
        mine = [_Part(found, tile) for found in detections]
        for other, theirs in self._parts.items():
            low, high = np.maximum(tile[:2], other[:2]), np.minimum(tile[2:], other[2:])
            if (low < high).all() and mine and theirs:
                self._join(mine, theirs, Tile(*low.tolist(), *high.tolist()))
        self._parts[tile] = mine

    def finish(self) -> Iterator[Detection]:
        """Yield the remaining objects, after the last tile."""
        yield from self._finish(self._image.height)

    def _finish(self, y: int) -> Iterator[Detection]:
        """Merge the objects whose tiles all end above a row."""
        above = [tile for tile in self._parts if tile.y1 <= y]
        done = [part.object for tile in above for part in self._parts.pop(tile)]
        for parts in {id(parts): parts for parts in done}.values():
            if all(part.tile.y1 <= y for part in parts):
                yield self._merged(parts)

    def _join(self, mine: list[_Part], theirs: list[_Part], zone: Tile) -> None:
        alike: list[tuple[float, float, int, _Part, _Part]] = []  # similarity there, in the image
        within: list[tuple[_Part, _Part]] = []  # the first is cut and lies in the second
        boxes = [np.stack([part.found.box for part in parts]) for parts in (mine, theirs)]
        in_image = _iou(*_areas(*boxes))
        in_zone = _areas(*(np.clip(some, zone[:2] * 2, zone[2:] * 2) for some in boxes))
        for i, j in np.argwhere(in_zone[2] > 0):
            a, b = mine[i], theirs[j]
            if a.found.category != b.found.category:
                continue
            areas = [float(of_boxes[i, j]) for of_boxes in in_zone]
            if a.found.mask and b.found.mask:
                masks = [a.mask_in(zone), b.mask_in(zone)]
                areas = coco_mask.area([*masks, coco_mask.merge(masks, intersect=True)]).tolist()
            iou = float(_iou(*areas))
            if iou >= self._merge_iou:
                alike.append((-iou, -in_image[i, j], len(alike), a, b))
                continue
            for part, other, area in ((a, b, areas[0]), (b, a, areas[1])):
                if self._is_cut(part, other.tile) and areas[2] >= self._merge_iou * area > 0:
                    within.append((part, other))
        have_one: set[int] = set()
        for most in (0, 1):  # first each with its best match, then the others with any match
            for *_, a, b in sorted(alike):
                if (id(a) in have_one) + (id(b) in have_one) <= most:
                    have_one |= {id(a), id(b)}
                    a.unite(b)
        for a, b in within:
            if id(a) not in have_one:
                a.unite(b)

    def _is_cut(self, part: _Part, beyond: Tile) -> bool:
        """Whether an object may continue beyond those borders of its tile that lie in another."""
        tile, near = part.tile, self._NEAR * max(part.tile.width, part.tile.height)
        low, high = part.found.box[:2] - tile[:2] < near, tile[2:] - part.found.box[2:] < near
        may_be_lower = low & (np.array(beyond[:2]) < tile[:2])
        may_be_higher = high & (np.array(tile[2:]) < beyond[2:])
        return bool((may_be_lower | may_be_higher).any())

    def _merged(self, parts: list[_Part]) -> Detection:
        best = max((part.found for part in parts), key=lambda found: found.score)
        boxes = np.stack([part.found.box for part in parts])
        box = np.concatenate([boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)])
        is_cut = any(self._is_cut(part, self._image) for part in parts)
        area, whole, _ = _areas(best.box[None], box[None])
        if not is_cut and area >= self._ALMOST_ALL * whole:
            parts, box = [part for part in parts if part.found is best], best.box
        mask = None
        if best.mask is not None:
            mask = coco_mask.merge([part.mask_in(self._image) for part in parts])
        return Detection(box, best.score, best.category, mask)


def _areas(a: NDArray[Any], b: NDArray[Any]) -> list[NDArray[Any]]:
    """Areas of n boxes, of m boxes, and of their intersections, each [n, m]."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    of_a, of_b = ((boxes[:, 2:] - boxes[:, :2]).prod(axis=1) for boxes in (a, b))
    return np.broadcast_arrays(of_a[:, None], of_b, np.clip(high - low, 0, None).prod(axis=2))


def _iou(a: Any, b: Any, shared: Any) -> Any:
    return shared / np.maximum(a + b - shared, 1e-9)


def move(rle: Rle, x: int, y: int, height: int, width: int) -> Rle:
    """Move a mask to another frame of this height and width. Pixels outside are dropped.

    pycocotools can only move a mask by way of all pixels of the frame: 400 MB for each object of an
    image of 20,000 x 20,000. COCO's code lists how many pixels are off, on, off and so on, down the
    columns and from left to right, so an object takes a few hundred bytes in a frame of any size.

    Args:
        x, y: position of the old frame's corner in the new one, in pixels.

    Raises:
        DataError: the frame has more pixels than the code can count.
    """
    if height * width >= 2**32:
        raise DataError(
            f"an image of {width} x {height} pixels has more than COCO's run-length code can "
            "count, 2^32 - 1: cut the image in two"
        )
    old_height, counts = rle["size"][0], rle["counts"]
    ends = np.cumsum(counts if isinstance(counts, list) else _counts(counts), dtype=np.int64)
    starts, ends = ends[: len(ends) // 2 * 2 : 2], ends[1::2]  # of runs of pixels that are on
    # Each run is cut into pieces of one column.
    pieces = (ends - 1) // old_height - starts // old_height + 1
    run = np.repeat(np.arange(len(starts)), pieces)
    nth = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    column = starts[run] // old_height + nth
    top = np.clip(np.maximum(starts[run] - column * old_height, 0) + y, 0, height)
    bottom = np.clip(np.minimum(ends[run] - column * old_height, old_height) + y, 0, height)
    column += x
    inside = (column >= 0) & (column < width) & (top < bottom)
    places = np.stack([top, bottom])[:, inside] + column[inside] * height
    # Where a piece ends and the next one begins, there is no border.
    borders, times = np.unique(places, return_counts=True)
    new = np.diff(borders[times == 1], prepend=0, append=height * width)
    new = new[: len(new) - (new[-1] == 0)]
    return coco_mask.frPyObjects({"size": [height, width], "counts": new.tolist()}, height, width)


def _counts(code: Any) -> NDArray[Any]:
    """Decode COCO's text of counts: groups of 5 bits, low bits first. Each number is stored as
    the difference to the last but one (``rleFrString`` in cocoapi/common/maskApi.c).
    """
    text = np.frombuffer(code.encode() if isinstance(code, str) else code, np.uint8)
    groups = text.astype(np.int64) - 48
    is_last = (groups & 32) == 0
    firsts = np.flatnonzero(np.append(True, is_last[:-1]))
    lengths = np.diff(firsts, append=len(groups))
    shifts = 5 * (np.arange(len(groups)) - np.repeat(firsts, lengths))
    numbers = np.add.reduceat((groups & 31) << shifts, firsts)
    is_negative = (groups[is_last] & 16) != 0
    numbers -= np.where(is_negative, 1 << (5 * lengths), 0)
    numbers[1::2] = np.cumsum(numbers[1::2])
    numbers[2::2] = np.cumsum(numbers[2::2])
    return numbers
