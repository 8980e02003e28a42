# Copyright (c) the d2_memfit developers.
"""Dataset dicts of any size and number of objects."""

from typing import Any, Optional

import numpy as np
from detectron2.data import MetadataCatalog
from detectron2.structures import BoxMode
from pycocotools import mask as coco_mask

__all__ = ["Size", "boxes_anywhere", "dict_of", "invented_dict", "num_instances_of"]

Size = tuple[int, int]  # height and width in pixels

_INVENTED: dict[str, Any] = {
    "bbox": [0] * 4,
    "category_id": 0,
    "iscrowd": 0,
    "segmentation": [],
    "keypoints": [0] * 51,  # COCO's 17
}


def num_instances_of(d: dict[str, Any]) -> int:
    """Number of objects; with keypoints, only objects with visible ones.

    Mappers and loaders look for these.
    """
    objects = [a for a in d.get("annotations", ()) if not a.get("iscrowd", 0)]
    visible = [a for a in objects if any(v > 0 for v in a.get("keypoints", (1, 1, 1))[2::3])]
    return len(visible) or len(d.get("segments_info", ()))


def dict_of(d: dict[str, Any], size: Size, num: Optional[int] = None) -> dict[str, Any]:
    """A dataset dict as if its image had another size, with boxes and masks anywhere in it.

    Args:
        num: number of objects or segments, if it is another. The dict's own objects are repeated.
    """
    made = {"file_name": "", **d, "height": size[0], "width": size[1]}
    if "annotations" in d:
        own = [a for a in d["annotations"] if not a.get("iscrowd", 0)]
        boxes = boxes_anywhere(len(own) if num is None else num, size).tolist()
        own = own or [_INVENTED]
        made["annotations"] = [_moved(own[i % len(own)], box, size) for i, box in enumerate(boxes)]
    if "segments_info" in d and num is not None:
        made["segments_info"] = _segments(num)
    return made


def _moved(annotation: dict[str, Any], box: list[float], size: Size) -> dict[str, Any]:
    """An annotation with another box [x0, y0, x1, y1]."""
    x0, y0, x1, y1 = box
    moved = dict(annotation if "bbox" in annotation else _INVENTED)
    polygons = [[x0, y0, x1, y0, x1, y1, x0, y1]]
    if isinstance(moved.get("segmentation"), dict):  # a run-length code
        moved["segmentation"] = coco_mask.merge(coco_mask.frPyObjects(polygons, *size))
    elif "segmentation" in moved:
        moved["segmentation"] = polygons
    if "keypoints" in moved:
        moved["keypoints"] = [(x0 + x1) / 2, (y0 + y1) / 2, 2] * (len(moved["keypoints"]) // 3)
    if len(moved["bbox"]) == 5:  # it has an angle
        box = [(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0, 0.0]
    mode = BoxMode.XYWHA_ABS if len(box) == 5 else BoxMode.XYXY_ABS
    return {**moved, "bbox": box, "bbox_mode": mode}


def invented_dict(
    size: Size, num_instances: int, name: str = "", with_labels: bool = False
) -> dict[str, Any]:
    """Make a dataset dict of Detectron2's format, with boxes, polygons and keypoints.

    Args:
        name: the missing dataset. Its metadata tells the number of keypoints, and whether there are
            label images or segments in place of annotations.
        with_labels: whether there are label images, if there is no such metadata.
    """
    metadata = MetadataCatalog.get(name) if name in MetadataCatalog.list() else None
    kind = metadata.get("evaluator_type", "") if metadata is not None else ""
    names = metadata.get("keypoint_names", ()) if metadata is not None else ()
    d: dict[str, Any] = {"file_name": "", "image_id": 0}
    if "sem_seg" in kind or "panoptic" in kind or with_labels:
        d["sem_seg_file_name"] = ""
    # Detectron2's datasets of this name have annotations, and label images of stuff.
    if "panoptic" in kind and not name.endswith("_separated"):
        d.update(pan_seg_file_name="", segments_info=[])
    elif "sem_seg" not in kind:
        annotation = {**_INVENTED, "keypoints": [0] * 3 * len(names)} if names else _INVENTED
        d["annotations"] = [annotation]
    return dict_of(d, size, num_instances)


def _segments(num: int) -> list[dict[str, Any]]:
    segment = {"category_id": 0, "iscrowd": 0, "isthing": True, "area": 1.0}
    return [{"id": i + 1, **segment} for i in range(num)]


def boxes_anywhere(num: int, size: Size, seed: int = 0) -> Any:
    """Boxes [num, 4] of all sizes, anywhere in an image."""
    corner, length = np.random.RandomState(seed).rand(2, num, 2)
    extent = size[::-1]
    corner, length = corner * 0.8 * extent, (length * 0.18 + 0.02) * extent
    return np.concatenate([corner, corner + length], axis=1)
