# Copyright (c) the d2_memfit developers.
"""Annotations of an image, in the pixels of one of its tiles."""

from typing import Any, Optional

import numpy as np
from detectron2.structures import BoxMode
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

from d2_memfit.errors import DataError
from d2_memfit.predict.tiles import Tile, move

__all__ = ["box_of", "clip_annotation"]


def box_of(annotation: dict[str, Any]) -> NDArray[Any]:
    """The box x0, y0, x1, y1 of an annotation, in pixels of the image [4]."""
    if annotation["bbox_mode"] == BoxMode.XYWHA_ABS:
        raise DataError(
            f"rotated boxes cannot be cut into tiles, and there is one: {annotation['bbox']}. "
            "Make them boxes along the axes, with the outline as segmentation"
        )
    box = BoxMode.convert(annotation["bbox"], annotation["bbox_mode"], BoxMode.XYXY_ABS)
    return np.asarray(box, dtype=float)


def clip_annotation(annotation: dict[str, Any], tile: Tile) -> Optional[dict[str, Any]]:
    """Copy an annotation, in pixels of the tile; None if nothing is visible there.

    Polygons are only moved: what rasterises them leaves out what is outside.
    """
    whole = box_of(annotation) - [tile.x0, tile.y0, tile.x0, tile.y0]
    box = np.clip(whole, 0, [tile.width, tile.height, tile.width, tile.height])
    clipped = {**annotation, "bbox": box.tolist(), "bbox_mode": BoxMode.XYXY_ABS}
    if "segmentation" in annotation:
        size, old = (tile.height, tile.width), annotation["segmentation"]
        if not old:
            return None
        new: Any
        if isinstance(old, dict):
            new = rle = move(old, -tile.x0, -tile.y0, *size)
        else:
            new = [(np.reshape(p, (-1, 2)) - [tile.x0, tile.y0]).ravel() for p in old]
            rle = coco_mask.merge(coco_mask.frPyObjects([p.tolist() for p in new], *size))
        if not coco_mask.area(rle):
            return None
        clipped["segmentation"] = new
        if (box != whole).any():  # drawn around the rest of the mask
            x, y, width, height = coco_mask.toBbox(rle).tolist()
            clipped["bbox"] = [x, y, x + width, y + height]
    return clipped
