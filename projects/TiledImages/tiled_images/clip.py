# Copyright (c) the d2_memfit developers.
"""Annotations of an image, clipped to one of its tiles."""

from typing import Any, Optional, Union

import numpy as np
from detectron2.structures import BoxMode
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

from d2_memfit.errors import DataError
from d2_memfit.predict.tiles import Rle, Tile, move

__all__ = ["box_of", "clip_annotation"]


def box_of(annotation: dict[str, Any]) -> NDArray[Any]:
    """The box x0, y0, x1, y1 of an annotation, in pixels of the image [4]."""
    if annotation["bbox_mode"] == BoxMode.XYWHA_ABS:
        raise DataError(
            f"rotated boxes cannot be cut into tiles, and there is one: {annotation['bbox']}. "
            "Make them boxes along the axes, with the outline as segmentation"
        )
    return np.asarray(
        BoxMode.convert(annotation["bbox"], annotation["bbox_mode"], BoxMode.XYXY_ABS), dtype=float
    )


def clip_annotation(annotation: dict[str, Any], tile: Tile) -> Optional[dict[str, Any]]:
    """Copy an annotation, in pixels of the tile; None if nothing is visible there."""
    whole = box_of(annotation) - [tile.x0, tile.y0, tile.x0, tile.y0]
    box = np.clip(whole, 0, [tile.width, tile.height, tile.width, tile.height])
    clipped = {**annotation, "bbox": box.tolist(), "bbox_mode": BoxMode.XYXY_ABS}
    if "segmentation" in annotation:
        segmentation = _clip_segmentation(annotation["segmentation"], tile)
        rle = segmentation if isinstance(segmentation, dict) else _rle(segmentation, tile)
        if not coco_mask.area(rle):
            return None
        clipped["segmentation"] = segmentation
        if (box != whole).any():  # drawn around the rest of the mask
            x, y, width, height = coco_mask.toBbox(rle).tolist()
            clipped["bbox"] = [x, y, x + width, y + height]
    return clipped


def _rle(polygons: list[Any], tile: Tile) -> Rle:
    if not polygons:
        return coco_mask.encode(np.zeros((tile.height, tile.width), np.uint8, order="F"))
    return coco_mask.merge(coco_mask.frPyObjects(polygons, tile.height, tile.width))


def _clip_segmentation(segmentation: Union[list[Any], Rle], tile: Tile) -> Union[list[Any], Rle]:
    if isinstance(segmentation, dict):
        return move(segmentation, -tile.x0, -tile.y0, tile.height, tile.width)
    polygons = [_clip_polygon(np.reshape(p, (-1, 2)), tile) for p in segmentation]
    return [p.ravel() for p in polygons if len(p) >= 3]


def _clip_polygon(polygon: NDArray[Any], tile: Tile) -> NDArray[Any]:
    """Corners [m, 2] of the part within the tile, in its pixels; [0, 2] if there is none.

    The algorithm is Sutherland and Hodgman's, 1974: one border after the other. Parts of a concave
    polygon stay joined along the border, by lines without area.
    """
    points = polygon - [tile.x0, tile.y0]
    for axis, length in ((0, tile.width), (1, tile.height)):
        points = _clip_at(points, points[:, axis])
        points = _clip_at(points, length - points[:, axis])
    return points


def _clip_at(points: NDArray[Any], inside: NDArray[Any]) -> NDArray[Any]:
    """Keep the part on the positive side.

    Args:
        points: [n, 2]
        inside: distance of each point from the border [n], negative outside.
    """
    kept = []
    for i in range(len(points)):
        a, b = inside[i - 1], inside[i]
        if (a < 0) != (b < 0):
            kept.append(points[i - 1] + (points[i] - points[i - 1]) * (a / (a - b)))
        if b >= 0:
            kept.append(points[i])
    return np.reshape(kept, (-1, 2))
