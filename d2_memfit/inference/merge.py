# Copyright (c) the d2_memfit developers.
"""Merging of objects that tiles cut apart or show twice, tile by tile."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch
from detectron2.structures import Instances
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

from .grid import Grid, Tile
from .rle import Rle, move

__all__ = ["Detection", "SeamMerger", "found_in_tile"]


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


@dataclass(eq=False)
class _Part:
    """The part of an object that one tile shows."""

    found: Detection
    tile: Tile
    object: "list[_Part]"  # all known parts of it


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
        self._grid = grid
        self._merge_iou = merge_iou
        self._parts: dict[Tile, list[_Part]] = {}  # parts of tiles that may overlap with later ones

    def add(self, tile: Tile, detections: Sequence[Detection]) -> Iterator[Detection]:
        """Add the detections of the next tile; yield objects that no later tile can show."""
        done = [t for t in self._parts if t.y1 <= tile.y0]
        finished = [part for t in done for part in self._parts.pop(t)]
        yield from self._finish(finished, tile.y0)
        mine = []
        for found in detections:
            part = _Part(found, tile, [])
            part.object.append(part)
            mine.append(part)
        for other, theirs in self._parts.items():
            zone = _overlap(tile, other)
            if zone:
                self._join(mine, theirs, zone)
        self._parts[tile] = mine

    def finish(self) -> Iterator[Detection]:
        """Yield the remaining objects, after the last tile."""
        parts = [part for parts in self._parts.values() for part in parts]
        self._parts.clear()
        yield from self._finish(parts, self._grid.height)

    def _finish(self, parts: list[_Part], y: int) -> Iterator[Detection]:
        """Merge the objects whose tiles all end above a row."""
        for parts_of_one in {id(part.object): part.object for part in parts}.values():
            if all(part.tile.y1 <= y for part in parts_of_one):
                yield self._merged(parts_of_one)

    def _join(self, mine: list[_Part], theirs: list[_Part], zone: Tile) -> None:
        if not mine or not theirs:
            return
        mine_in, theirs_in = (
            _clip(np.stack([part.found.box for part in parts]), zone) for parts in (mine, theirs)
        )
        alike: list[tuple[float, float, _Part, _Part]] = []  # similarity there and in the image
        within: list[tuple[_Part, _Part]] = []  # the first is cut and lies in the second
        for i, j in np.argwhere(_intersections(mine_in, theirs_in) > 0):
            a = mine[i]
            b = theirs[j]
            if a.found.category != b.found.category:
                continue
            shared, area_a, area_b = _areas(a, b, mine_in[i], theirs_in[j], zone)
            iou = shared / max(area_a + area_b - shared, 1e-9)
            if iou >= self._merge_iou:
                alike.append((iou, _iou(a.found.box, b.found.box), a, b))
                continue
            if self._is_cut(a, b.tile) and shared >= self._merge_iou * area_a > 0:
                within.append((a, b))
            if self._is_cut(b, a.tile) and shared >= self._merge_iou * area_b > 0:
                within.append((b, a))
        have_one: set[int] = set()
        pairs = [pair[2:] for pair in sorted(alike, key=lambda pair: pair[:2], reverse=True)]
        for most in (0, 1):  # first each with its best match, then the others with any match
            for a, b in pairs:
                if (id(a) in have_one) + (id(b) in have_one) <= most:
                    have_one |= {id(a), id(b)}
                    _unite(a, b)
        for a, b in within:
            if id(a) not in have_one:
                _unite(a, b)

    def _is_cut(self, part: _Part, other: Optional[Tile] = None) -> bool:
        """Whether the object may continue beyond a border of its tile.

        Only borders inside ``other`` count; without it, borders inside the image.
        """
        tile = part.tile
        near = self._NEAR * max(tile.width, tile.height)
        x0, y0, x1, y1 = part.found.box
        beyond = other or Tile(0, 0, self._grid.width, self._grid.height)
        return bool(
            (x0 - tile.x0 < near and beyond.x0 < tile.x0)
            or (y0 - tile.y0 < near and beyond.y0 < tile.y0)
            or (tile.x1 - x1 < near and tile.x1 < beyond.x1)
            or (tile.y1 - y1 < near and tile.y1 < beyond.y1)
        )

    def _merged(self, parts: list[_Part]) -> Detection:
        best = max(parts, key=lambda part: part.found.score)
        boxes = np.stack([part.found.box for part in parts])
        united = np.concatenate([boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)])
        is_cut = any(self._is_cut(part) for part in parts)
        if not is_cut and _area(best.found.box) >= self._ALMOST_ALL * _area(united):
            parts = [best]
            united = best.found.box
        mask = None
        if best.found.mask:
            image = Tile(0, 0, self._grid.width, self._grid.height)
            masks = [_mask_in(part, image) for part in parts]
            mask = masks[0] if len(masks) == 1 else coco_mask.merge(masks)
        return Detection(united, best.found.score, best.found.category, mask)


def _unite(a: _Part, b: _Part) -> None:
    if a.object is not b.object:
        for part in b.object:
            part.object = a.object
            a.object.append(part)


def _areas(
    a: _Part, b: _Part, box_a: NDArray[Any], box_b: NDArray[Any], zone: Tile
) -> tuple[float, float, float]:
    """Areas of two parts in a zone: of their intersection, of the first, and of the second.

    They come from their masks, or from their boxes in the zone.
    """
    if a.found.mask and b.found.mask:
        masks = [_mask_in(a, zone), _mask_in(b, zone)]
        area_a, area_b = coco_mask.area(masks).tolist()
        return float(coco_mask.area(coco_mask.merge(masks, intersect=True))), area_a, area_b
    shared = float(_intersections(box_a[None], box_b[None])[0, 0])
    return shared, _area(box_a), _area(box_b)


def _mask_in(part: _Part, frame: Tile) -> Rle:
    assert part.found.mask is not None
    x = part.tile.x0 - frame.x0
    y = part.tile.y0 - frame.y0
    return move(part.found.mask, x, y, frame.height, frame.width)


def _overlap(a: Tile, b: Tile) -> Optional[Tile]:
    """The area that two tiles share; None if there is none."""
    zone = Tile(max(a.x0, b.x0), max(a.y0, b.y0), min(a.x1, b.x1), min(a.y1, b.y1))
    return zone if zone.width > 0 and zone.height > 0 else None


def _clip(boxes: NDArray[Any], zone: Tile) -> NDArray[Any]:
    low = [zone.x0, zone.y0] * 2
    high = [zone.x1, zone.y1] * 2
    return np.clip(boxes, low, high)


def _area(box: NDArray[Any]) -> float:
    return float((box[2] - box[0]) * (box[3] - box[1]))


def _iou(a: NDArray[Any], b: NDArray[Any]) -> float:
    shared = float(_intersections(a[None], b[None])[0, 0])
    return shared / max(_area(a) + _area(b) - shared, 1e-9)


def _intersections(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Areas of the intersections of n boxes with m boxes [n, m]."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    return np.clip(high - low, 0, None).prod(axis=2)


def found_in_tile(instances: Instances, tile: Tile) -> list[Detection]:
    """The detections of a model that got one tile."""
    instances = instances.to("cpu")
    boxes = instances.pred_boxes.tensor.double().numpy() + [tile.x0, tile.y0] * 2
    masks = instances.pred_masks if instances.has("pred_masks") else [None] * len(boxes)
    return [
        Detection(box, float(score), int(category), None if mask is None else _encode(mask))
        for box, score, category, mask in zip(
            boxes, instances.scores, instances.pred_classes, masks
        )
    ]


def _encode(mask: torch.Tensor) -> dict[str, Any]:
    return coco_mask.encode(np.asfortranarray(mask.numpy().astype(np.uint8)))
