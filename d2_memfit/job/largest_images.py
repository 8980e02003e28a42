# Copyright (c) the d2_memfit developers.
"""Dataset dicts of any size and number of objects, and sizes that can give the largest images."""

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from detectron2.data import MetadataCatalog
from detectron2.data.transforms import ResizeShortestEdge
from detectron2.structures import BoxMode
from pycocotools import mask as coco_mask

__all__ = [
    "ANY_SIZE",
    "DEFAULT_INSTANCES",
    "EXTREME_SIZES",
    "TYPICAL_SIZE",
    "Size",
    "WorstCase",
    "any_shape",
    "boxes_anywhere",
    "dict_of_size",
    "invented_dict",
    "largest_sizes",
    "num_instances_of",
    "resized",
    "rotated",
    "with_boxes_alone",
    "with_few_annotations",
    "with_instances",
]

# Used if no dataset is there to count: the most crowded image of COCO's training set has 93.
DEFAULT_INSTANCES = 100
ANY_SIZE = (800, 1333)  # of an image, where nothing depends on it
# Of photographs. Cameras and COCO have 3 to 4 mostly. Tiles are square, and Cityscapes has 1 to 2.
# One of these has the fewest pixels after a resize: which, depends on its limit of the longer side.
TYPICAL_SIZE = (960, 1280)
EXTREME_SIZES = ((1280, 1280), (1280, 2560))

Size = tuple[int, int]  # height and width in pixels


@dataclass(frozen=True)
class WorstCase:
    """The largest images as the model gets them.

    Attributes:
        image_size: height and width in pixels.
        num_instances: annotated objects in each image.
    """

    image_size: Size
    num_instances: int


_COCO_KEYPOINTS = 17

# Width / height of landscapes. Crops and limits of the longer side favour one of them.
_ASPECTS = (1, 5 / 4, 4 / 3, 3 / 2, 5 / 3, 16 / 9, 2)


def num_instances_of(d: dict[str, Any]) -> int:
    """Number of objects; with keypoints, only objects with visible ones.

    Mappers and loaders look for these.
    """
    objects = [a for a in d.get("annotations", ()) if not a.get("iscrowd", 0)]
    visible = [a for a in objects if any(v > 0 for v in a.get("keypoints", (1, 1, 1))[2::3])]
    return len(visible) or len(d.get("segments_info", ()))


def dict_of_size(d: dict[str, Any], size: Size) -> dict[str, Any]:
    """Copy a dataset dict as if its image had another size."""
    result = copy.deepcopy(d)
    scale = size[0] / d["height"], size[1] / d["width"]
    result.update(height=size[0], width=size[1], file_name=result.get("file_name", ""))
    if any("bbox" not in a for a in d.get("annotations", ())):  # only their number counts
        num = sum(not a.get("iscrowd", 0) for a in d["annotations"])
        result["annotations"] = _annotations(num, size)
    elif scale != (1, 1):
        for annotation in result.get("annotations", ()):
            _scale(annotation, scale, size)
    return result


def _scale(annotation: dict[str, Any], scale: tuple[float, float], size: Size) -> None:
    y, x = scale
    angle = (1,) * (len(annotation["bbox"]) - 4)  # rotated boxes have one
    annotation["bbox"] = (np.asarray(annotation["bbox"]) * (x, y, x, y, *angle)).tolist()
    segmentation = annotation.get("segmentation")
    if isinstance(segmentation, list):
        scaled = [(np.reshape(p, (-1, 2)) * (x, y)).reshape(-1).tolist() for p in segmentation]
        annotation["segmentation"] = scaled
    elif isinstance(segmentation, dict):  # the shape of a mask does not matter
        mode = annotation.get("bbox_mode", BoxMode.XYWH_ABS)
        x0, y0, x1, y1 = BoxMode.convert(annotation["bbox"], mode, BoxMode.XYXY_ABS)
        codes = coco_mask.frPyObjects([[x0, y0, x1, y0, x1, y1, x0, y1]], *size)
        annotation["segmentation"] = coco_mask.merge(codes)
    if "keypoints" in annotation:
        points = np.reshape(annotation["keypoints"], (-1, 3)) * (x, y, 1)
        annotation["keypoints"] = points.reshape(-1).tolist()


def with_instances(d: dict[str, Any], num: int) -> dict[str, Any]:
    """A dataset dict with another number of objects or segments; its own are repeated."""
    objects = [a for a in d.get("annotations", ()) if not a.get("iscrowd", 0) and "bbox" in a]
    result = dict(d)
    if objects:
        result["annotations"] = [copy.deepcopy(objects[i % len(objects)]) for i in range(num)]
    elif "annotations" in d:
        result["annotations"] = _annotations(num, (d["height"], d["width"]))
    if "segments_info" in d:
        result["segments_info"] = _segments(num)
    return result


def with_few_annotations(d: dict[str, Any]) -> dict[str, Any]:
    """Keep two annotations, for a mapper that crops around one of them."""
    return {**d, "annotations": d["annotations"][:2]} if "annotations" in d else d


def with_boxes_alone(d: dict[str, Any]) -> dict[str, Any]:
    """Keep two annotations, without masks and keypoints."""
    d = with_few_annotations(d)
    shapes = ("segmentation", "keypoints")
    boxes = [{k: v for k, v in a.items() if k not in shapes} for a in d.get("annotations", ())]
    return {**d, "annotations": boxes} if "annotations" in d else d


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
    # Detectron2's datasets of this name have annotations, and label images of stuff.
    has_segments = "panoptic" in kind and not name.endswith("_separated")
    d: dict[str, Any] = {"file_name": "", "image_id": 0, "height": size[0], "width": size[1]}
    if "sem_seg" in kind or "panoptic" in kind or with_labels:
        d["sem_seg_file_name"] = ""
    if has_segments:
        d["pan_seg_file_name"] = ""
        d["segments_info"] = _segments(num_instances)
    elif "sem_seg" not in kind:
        d["annotations"] = _annotations(num_instances, size, num_keypoints or _COCO_KEYPOINTS)
    return d


def _annotations(
    num: int, size: Size, num_keypoints: int = _COCO_KEYPOINTS
) -> list[dict[str, Any]]:
    boxes = boxes_anywhere(num, size)
    x0, y0, x1, y1 = boxes.T
    corners = np.stack([x0, y0, x1, y0, x1, y1, x0, y1], axis=1)
    points = np.stack([(x0 + x1) / 2, (y0 + y1) / 2, np.full(len(boxes), 2.0)], axis=1)
    return [
        {
            "bbox": box.tolist(),
            "bbox_mode": BoxMode.XYXY_ABS,
            "category_id": 0,
            "iscrowd": 0,
            "segmentation": [polygon.tolist()],
            "keypoints": np.tile(point, num_keypoints).tolist(),
        }
        for box, polygon, point in zip(boxes, corners, points)
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


def largest_sizes(sizes: Iterable[Size], resizes: Iterable[tuple[int, int]]) -> list[Size]:
    """A few sizes that can give the largest images.

    Args:
        resizes: lengths of the shorter side and limits of the longer side for the resize.
    """
    sizes = set(sizes)
    found = {max(sizes, key=math.prod), max(sizes), max(sizes, key=lambda size: size[::-1])}
    for is_wide in (False, True):
        group = [size for size in sizes if (size[1] > size[0]) == is_wide]
        if not group:
            continue
        for aspect in _ASPECTS:
            wanted = aspect if is_wide else 1 / aspect
            found.add(min(group, key=lambda s: abs(math.log(s[1] / s[0] / wanted))))
        for short, long in resizes:
            outputs = {size: resized(size, short, long) for size in group}
            found |= {max(group, key=lambda s: outputs[s]), max(group, key=lambda s: outputs[s][1])}
            found.add(max(group, key=lambda s: math.prod(outputs[s])))
    return sorted(found)


def any_shape(resizes: Iterable[tuple[int, int]]) -> set[Size]:
    """Sizes that an unknown dataset may have, for images that are resized."""
    shapes = {(min(pair), max(pair)) for pair in resizes if min(pair) > 0}
    shapes |= {(800, round(800 * aspect)) for aspect in _ASPECTS}
    return shapes | {size[::-1] for size in shapes}


def resized(size: Size, short: int, long: int) -> Size:
    """Resize like ``ResizeShortestEdge``; a shorter side of 0 keeps the size."""
    return size if short == 0 else ResizeShortestEdge.get_output_shape(*size, short, long)
