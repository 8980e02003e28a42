# Copyright (c) the d2_memfit developers.
"""Dataset dicts of any size and number of objects."""

import copy
from typing import Any, Optional

import numpy as np
import torch
from detectron2.data import MetadataCatalog
from detectron2.structures import BoxMode
from pycocotools import mask as coco_mask

__all__ = ["Size", "boxes_anywhere", "dict_of", "invented_dict", "num_instances_of", "rotated"]

Size = tuple[int, int]  # height and width in pixels

_COCO_KEYPOINTS = 17


def num_instances_of(d: dict[str, Any]) -> int:
    """Number of objects; with keypoints, only objects with visible ones.

    Mappers and loaders look for these.
    """
    objects = [a for a in d.get("annotations", ()) if not a.get("iscrowd", 0)]
    visible = [a for a in objects if any(v > 0 for v in a.get("keypoints", (1, 1, 1))[2::3])]
    return len(visible) or len(d.get("segments_info", ()))


def dict_of(d: dict[str, Any], size: Size, num: Optional[int] = None) -> dict[str, Any]:
    """Copy a dataset dict as if its image had another size. Crowds are left out.

    Args:
        num: number of objects or segments, if it is another. The dict's own objects are repeated.
    """
    scale = size[0] / d["height"], size[1] / d["width"]
    made = {**copy.deepcopy(d), "height": size[0], "width": size[1]}
    made.setdefault("file_name", "")
    if "annotations" in d:
        own = [a for a in d["annotations"] if not a.get("iscrowd", 0)]
        num_made = len(own) if num is None else num
        if own and all("bbox" in a for a in own):
            repeated = [own[i % len(own)] for i in range(num_made)]
            made["annotations"] = [_scaled(a, scale, size) for a in repeated]
        else:
            made["annotations"] = _annotations(num_made, size)
    if "segments_info" in d and num is not None:
        made["segments_info"] = _segments(num)
    return made


def _scaled(annotation: dict[str, Any], scale: tuple[float, float], size: Size) -> dict[str, Any]:
    scaled = copy.deepcopy(annotation)
    if scale == (1, 1):
        return scaled
    y, x = scale
    angle = (1,) * (len(annotation["bbox"]) - 4)  # rotated boxes have one
    scaled["bbox"] = (np.asarray(annotation["bbox"]) * (x, y, x, y, *angle)).tolist()
    segmentation = annotation.get("segmentation")
    if isinstance(segmentation, list):
        polygons = [(np.reshape(p, (-1, 2)) * (x, y)).reshape(-1).tolist() for p in segmentation]
        scaled["segmentation"] = polygons
    elif isinstance(segmentation, dict):  # the shape of a mask does not matter
        mode = annotation.get("bbox_mode", BoxMode.XYWH_ABS)
        x0, y0, x1, y1 = BoxMode.convert(scaled["bbox"], mode, BoxMode.XYXY_ABS)
        codes = coco_mask.frPyObjects([[x0, y0, x1, y0, x1, y1, x0, y1]], *size)
        scaled["segmentation"] = coco_mask.merge(codes)
    if "keypoints" in annotation:
        points = np.reshape(annotation["keypoints"], (-1, 3)) * (x, y, 1)
        scaled["keypoints"] = points.reshape(-1).tolist()
    return scaled


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
    num_keypoints = len(metadata.get("keypoint_names", ())) if metadata is not None else 0
    d: dict[str, Any] = {"file_name": "", "image_id": 0, "height": size[0], "width": size[1]}
    if "sem_seg" in kind or "panoptic" in kind or with_labels:
        d["sem_seg_file_name"] = ""
    # Detectron2's datasets of this name have annotations, and label images of stuff.
    if "panoptic" in kind and not name.endswith("_separated"):
        d.update(pan_seg_file_name="", segments_info=_segments(num_instances))
    elif "sem_seg" not in kind:
        d["annotations"] = _annotations(num_instances, size, num_keypoints or _COCO_KEYPOINTS)
    return d


def _annotations(num: int, size: Size, num_keypoints: int = _COCO_KEYPOINTS) -> list[Any]:
    return [
        {
            "bbox": [x0, y0, x1, y1],
            "bbox_mode": BoxMode.XYXY_ABS,
            "category_id": 0,
            "iscrowd": 0,
            "segmentation": [[x0, y0, x1, y0, x1, y1, x0, y1]],
            "keypoints": [(x0 + x1) / 2, (y0 + y1) / 2, 2] * num_keypoints,
        }
        for x0, y0, x1, y1 in boxes_anywhere(num, size).tolist()
    ]


def _segments(num: int) -> list[dict[str, Any]]:
    segment = {"category_id": 0, "iscrowd": 0, "isthing": True, "area": 1.0}
    return [{"id": i + 1, **segment} for i in range(num)]


def boxes_anywhere(num: int, size: Size, seed: int = 0) -> Any:
    """Boxes [num, 4] of all sizes, anywhere in an image."""
    corner, length = np.random.RandomState(seed).rand(2, num, 2)
    extent = size[::-1]
    corner, length = corner * 0.8 * extent, (length * 0.18 + 0.02) * extent
    return np.concatenate([corner, corner + length], axis=1)


def rotated(boxes: torch.Tensor) -> torch.Tensor:
    """Boxes [N, 5] of ``RotatedBoxes`` for upright boxes [N, 4]."""
    corner, size = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
    return torch.cat([corner + size / 2, size, torch.zeros(len(boxes), 1)], dim=1)
