"""What is odd in the annotations of dataset dicts, counted in one pass."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
from detectron2.structures import BoxMode

__all__ = ["FAR", "AnnotationFacts", "Case", "fault_of_segmentation", "look_at_annotations"]

# Pixels from which on the corner of a polygon cannot be meant. Drawing a polygon takes memory for
# each pixel on its border (rleFrPoly of pycocotools): 1e9 is tens of GB, a NaN all RAM.
FAR = 1_000_000
_CORNERS = (BoxMode.XYXY_ABS, BoxMode.XYXY_REL)


@dataclass
class Case:
    """Objects with the same fault: how many, and where the first is."""

    number: int = 0
    first: str = ""

    def __bool__(self) -> bool:
        return self.number > 0


@dataclass
class AnnotationFacts:
    """Objects are annotations other than those of crowds.

    Attributes:
        num_images, num_objects: in all dicts.
        most_objects: in one image.
        cases: by fault, such as "negative_box"; those that do not occur are not there.
        classes: by ``category_id``, written as in Python.
    """

    num_images: int = 0
    num_objects: int = 0
    most_objects: int = 0
    cases: dict[str, Case] = field(default_factory=dict)
    classes: dict[str, Case] = field(default_factory=dict)

    def case(self, fault: str) -> Case:
        return self.cases.get(fault, Case())


def look_at_annotations(dicts: Iterable[Mapping[str, Any]]) -> AnnotationFacts:
    """One pass over Detectron2's dataset dicts: about 3 s of CPU for COCO's 860,000 annotations."""
    facts = AnnotationFacts()
    for image in dicts:
        facts.num_images += 1
        objects = [a for a in image.get("annotations", ()) if not a.get("iscrowd", 0)]
        facts.num_objects += len(objects)
        facts.most_objects = max(facts.most_objects, len(objects))
        size = image.get("height"), image.get("width")
        for number, annotation in enumerate(objects):
            for fault in _faults(annotation, size):
                _count(facts.cases, fault, image, number, annotation)
            category = annotation.get("category_id")
            name = str(int(category)) if isinstance(category, Integral) else repr(category)
            _count(facts.classes, name, image, number, annotation)
    return facts


def _count(
    cases: dict[str, Case],
    key: str,
    image: Mapping[str, Any],
    number: int,
    annotation: Mapping[str, Any],
) -> None:
    case = cases.get(key)
    if case is None:
        # Detectron2's dicts have no ids of annotations, unless a project wants them.
        name = f"id {annotation['id']}" if "id" in annotation else f"object {number}"
        where = f"{name} of {image.get('file_name', image.get('image_id'))}"
        case = cases[key] = Case(0, f"{where}, bbox {annotation.get('bbox')}")
    case.number += 1


def _faults(annotation: Mapping[str, Any], size: tuple[Any, Any]) -> list[str]:
    faults = []
    if fault := _fault_of_box(annotation.get("bbox"), annotation.get("bbox_mode")):
        faults.append(fault)
    segmentation = annotation.get("segmentation")
    if isinstance(segmentation, dict):
        faults.append("rle")
    if fault := fault_of_segmentation(segmentation, *size):
        faults.append(fault)
    keypoints = annotation.get("keypoints")
    if keypoints is None or not len(keypoints):
        faults.append("no_keypoints")
    return faults


def _fault_of_box(box: Any, mode: Any) -> str:
    try:
        if not math.isfinite(sum(box)):
            return "nan_box"
        width, height = box[2], box[3]
        if mode in _CORNERS:
            width, height = width - box[0], height - box[1]
    except (IndexError, TypeError):
        return "no_box"
    if width < 0 or height < 0:
        return "negative_box"
    return "" if width > 0 and height > 0 else "empty_box"


def fault_of_segmentation(segmentation: Any, height: Any = None, width: Any = None) -> str:
    """What is wrong with a mask as a COCO file or a dataset dict has it.

    Returns:
        str: "" for nothing; "no_mask" for none, or polygons of fewer than three corners alone;
        "bad_polygon" for a NaN or a corner out of reach; "bad_rle" for a run-length code that is
        none, and "rle_size" for one that is not of the image's size.
    """
    if isinstance(segmentation, np.ndarray):
        return ""  # a bit mask
    if isinstance(segmentation, dict):
        size: Any = segmentation.get("size")
        if not _is_size(size) or not _are_counts(segmentation):
            return "bad_rle"
        return "rle_size" if height is not None and list(size) != [height, width] else ""
    if not segmentation:
        return "no_mask"
    if not isinstance(segmentation, (list, tuple)):
        return "bad_polygon"
    try:
        return _fault_of_polygons(segmentation)
    except TypeError:  # no lists of numbers
        return "bad_polygon"


def _fault_of_polygons(polygons: Sequence[Any]) -> str:
    """Detectron2 leaves those of less than three corners out."""
    fault = "no_mask"
    for polygon in polygons:
        if len(polygon) < 6:
            continue
        if _is_out_of_reach(polygon):
            return "bad_polygon"
        fault = "odd_polygon" if len(polygon) % 2 or fault == "odd_polygon" else ""
    return fault


def _is_size(size: Any) -> bool:
    is_pair = isinstance(size, (list, tuple)) and len(size) == 2
    return is_pair and all(isinstance(side, int) and side > 0 for side in size)


def _are_counts(code: dict[str, Any]) -> bool:
    counts = code.get("counts")
    if isinstance(counts, list):  # of pixels, not compressed
        are_numbers = all(isinstance(n, int) and n >= 0 for n in counts)
        return are_numbers and sum(counts) == math.prod(code["size"])
    return isinstance(counts, (str, bytes)) and len(counts) > 0


def _is_out_of_reach(polygon: Any) -> bool:
    if isinstance(polygon, np.ndarray):
        return not bool(np.all(np.abs(polygon) < FAR))
    if math.hypot(*polygon) < FAR:  # the fastest look at all corners, and False for NaN
        return False
    return not (math.isfinite(sum(polygon)) and max(map(abs, polygon)) < FAR)
