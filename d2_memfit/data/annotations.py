# Copyright (c) the d2_memfit developers.
"""Faults in the annotations of dataset dicts, counted in one pass."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from numbers import Integral
from typing import Any, Optional

import numpy as np
from detectron2.config import CfgNode
from detectron2.structures import BoxMode
from pycocotools import mask as coco_masks

from ..errors import DataError, printable

__all__ = [
    "FAR",
    "TOLERABLE",
    "AnnotationSummary",
    "Case",
    "check_boxes",
    "check_crowd",
    "check_masks",
    "complaints_about_boxes",
    "complaints_about_labels",
    "look_at_annotations",
]

# Pixels from which a polygon's corner must be an error. Drawing a polygon takes memory for each
# pixel on its border (rleFrPoly of pycocotools): 1e9 takes tens of GB, a NaN all RAM.
FAR = 1_000_000
_XYXY, _XYWH = BoxMode.XYXY_ABS, BoxMode.XYWH_ABS  # slow to look up
_CORNERS = (BoxMode.XYXY_ABS, BoxMode.XYXY_REL)
_IN_PIXELS = (BoxMode.XYXY_ABS, BoxMode.XYWH_ABS)
_EMPTY = 1e-5  # pixels; Detectron2's filter_empty_instances drops boxes up to this size
_TINY = 2  # pixels
# How far a box may leave its image: objects at the edge are often drawn a little over it.
_OVER_EDGE = 0.05  # of the image's side
_OVER_EDGE_PIXELS = 2
# How far a mask may leave its box: boxes are often drawn by hand, or rounded.
_OVER_BOX = 0.05  # of the box's side
_OVER_BOX_PIXELS = 2
_FLAT = 1e-3  # square pixels; a mask with less has no area
_AT_A_TIME = 1000  # masks that are compared with their boxes together
_EXAMPLES = 3
# Only these faults matter in crowds, which are not trained on, but drawn in an evaluation.
_FAULTS_OF_CROWDS = ("bad_polygon", "bad_rle", "odd_polygon", "rle_size")
# Training continues with these, so they are an error only if most masks have one.
TOLERABLE = ("thin_mask", "flat_mask", "stray_mask")
# Faults of an annotation with which its mask can still be compared with its box.
_COMPARABLE = {"rle", "no_keypoints", "tiny_box", "corners_box", "outside_box"}

# What is wrong with masks and keypoints, by fault.
_MASKS = {
    "no_mask": "MODEL.MASK_ON is True, but {number} of {total} objects have no mask. Training "
    "drops them, and images that have no others, or stops. Add masks, use a config of "
    "COCO-Detection, or set MODEL.MASK_ON False: {first}",
    "thin_mask": "MODEL.MASK_ON is True, but {number} of {total} objects have a mask without a "
    "polygon of three corners. Training drops them: {first}",
    "rle_size": "{number} of {total} masks are run-length codes of another size than their image. "
    "Training stops, or learns from them wrongly: {first}",
    "bad_rle": "{number} of {total} masks are mappings without the size and counts of a run-length "
    "code. Training stops when one is loaded: {first}",
    "odd_polygon": "{number} of {total} masks have a polygon with an odd number of coordinates. "
    "Training stops when one is loaded: {first}",
    "flat_mask": "{number} of {total} masks have no area: their corners lie on one line, or their "
    "code is empty. Nothing is learnt from them: {first}",
    "stray_mask": "{number} of {total} masks lie mostly outside their box, and are cut off there. "
    "Were they drawn on images of another size, or is x swapped with y? {first}",
}
_CODES = {
    "rle": "INPUT.MASK_FORMAT is polygon, but {number} of {total} masks are run-length codes. Set "
    "it to bitmask: {first}",
}
_KEYPOINTS = {
    "no_keypoints": "MODEL.KEYPOINT_ON is True, but {number} of {total} objects have no keypoints. "
    "Training stops when one is loaded: {first}",
}
# Objects in one image. Their masks and their comparison with 10,000 boxes take minutes and 20 GB.
_MOST_OBJECTS = 50_000


@dataclass
class Case:
    """Objects with the same fault: their number, and the places of the first three."""

    number: int = 0
    examples: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.number > 0

    @property
    def first(self) -> str:
        return next(iter(self.examples), "")


@dataclass
class AnnotationSummary:
    """A summary of annotations. Objects are annotations that are not crowds.

    Attributes:
        num_images, num_objects: totals over all dicts.
        num_images_with_objects: number of images that have any.
        most_objects: the most objects in one image.
        most_crowded: the name of that image.
        cases: cases of each fault that occurs, such as "negative_box". Cases of masks include
            crowds.
        classes: cases by ``category_id``, written as in Python.
        images: cases of each fault of image files, from :func:`~.images.look_at_images`.
    """

    num_images: int = 0
    num_objects: int = 0
    num_images_with_objects: int = 0
    most_objects: int = 0
    most_crowded: str = ""
    cases: dict[str, Case] = field(default_factory=dict)
    classes: dict[str, Case] = field(default_factory=dict)
    images: dict[str, Case] = field(default_factory=dict)

    def case(self, fault: str) -> Case:
        return self.cases.get(fault, Case())


_Place = tuple[Mapping[str, Any], int, Mapping[str, Any]]  # image, place in it, annotation


def look_at_annotations(dicts: Iterable[Mapping[str, Any]]) -> AnnotationSummary:
    """Check Detectron2's dataset dicts: about 6 s of CPU for COCO's 860,000 annotations."""
    summary = AnnotationSummary()
    masks: list[_Place] = []  # to be compared with their boxes
    for image in dicts:
        summary.num_images += 1
        annotations = image.get("annotations", ())
        num = sum([not a.get("iscrowd", 0) for a in annotations])
        summary.num_objects += num
        summary.num_images_with_objects += num > 0
        if num > summary.most_objects:
            summary.most_objects = num
            summary.most_crowded = str(image.get("file_name", image.get("image_id")))
        size = image.get("height"), image.get("width")
        if not all(isinstance(side, (int, float)) for side in size):
            size = None, None
        for number, annotation in enumerate(annotations):
            is_crowd = annotation.get("iscrowd", 0)
            faults = _faults_of(annotation, size)
            for fault in faults:
                if not is_crowd or fault in _FAULTS_OF_CROWDS:
                    _count(summary.cases, fault, image, number, annotation)
            if not is_crowd:
                category = annotation.get("category_id")
                is_number = type(category) is int or isinstance(category, Integral)
                name = str(int(category)) if is_number else repr(category)
                _count(summary.classes, name, image, number, annotation)
                if _COMPARABLE.issuperset(faults):
                    masks.append((image, number, annotation))
        if len(masks) >= _AT_A_TIME:
            _compare_with_boxes(masks, summary.cases)
            masks.clear()
    _compare_with_boxes(masks, summary.cases)
    return summary


def _count(
    cases: dict[str, Case],
    key: str,
    image: Mapping[str, Any],
    number: int,
    annotation: Mapping[str, Any],
) -> None:
    """Count an object under a key; ``number`` is its place in the image."""
    case = cases.get(key) or cases.setdefault(key, Case())
    case.number += 1
    if case.number <= _EXAMPLES:
        # Detectron2's dicts have no annotation ids, unless a project adds them.
        name = f"id {annotation['id']}" if "id" in annotation else f"object {number}"
        where = f"{name} of {image.get('file_name', image.get('image_id'))}"
        case.examples.append(printable(f"{where}, bbox {annotation.get('bbox')}"))


def _compare_with_boxes(places: Sequence[_Place], cases: dict[str, Case]) -> None:
    """Count masks without area, and masks outside their boxes."""
    outlines = [_outline(annotation) for _, _, annotation in places]
    places = [place for place, outline in zip(places, outlines) if outline]
    outlines = [outline for outline in outlines if outline]
    if not outlines:
        return
    polygons = list(chain.from_iterable(outlines))
    ends = np.cumsum(list(map(len, polygons))) // 2
    numbers = np.fromiter(chain.from_iterable(polygons), float)
    x, y = numbers[::2].copy(), numbers[1::2].copy()
    starts = np.append(0, ends[:-1])
    following = np.arange(1, len(x) + 1)
    following[ends - 1] = starts
    areas = np.abs(np.add.reduceat(x * y[following] - x[following] * y, starts)) / 2
    of_masks = np.cumsum([0, *map(len, outlines[:-1])])
    is_flat = np.add.reduceat(areas, of_masks) < _FLAT
    low, high = (
        np.stack([extreme.reduceat(axis, starts[of_masks]) for axis in (x, y)])
        for extreme in (np.minimum, np.maximum)
    )
    boxes = chain.from_iterable([annotation["bbox"][:4] for _, _, annotation in places])
    start, length = np.fromiter(boxes, float).reshape(-1, 2, 2).transpose(1, 2, 0)
    length -= start * [annotation.get("bbox_mode") == _XYXY for _, _, annotation in places]
    over = _OVER_BOX * length + _OVER_BOX_PIXELS
    shared = np.minimum(high, start + length + over) - np.maximum(low, start - over)
    is_stray = 2 * np.prod(np.maximum(shared, 0), axis=0) < np.prod(high - low, axis=0)
    for fault, is_wrong in (("flat_mask", is_flat), ("stray_mask", is_stray & ~is_flat)):
        wrong = np.flatnonzero(is_wrong)
        for i in wrong[:_EXAMPLES]:
            _count(cases, fault, *places[i])
        if len(wrong) > _EXAMPLES:  # calls for all would take a second
            cases[fault].number += len(wrong) - _EXAMPLES


def _outline(annotation: Mapping[str, Any]) -> list[Any]:
    """Polygons of three corners or more, or that of a run-length code's box; none if unknown."""
    mask = annotation["segmentation"]
    if annotation.get("bbox_mode", _XYWH) not in _IN_PIXELS or isinstance(mask, np.ndarray):
        return []
    if not isinstance(mask, dict):
        return [polygon for polygon in mask if len(polygon) >= 6]
    is_list = isinstance(mask["counts"], list)
    x, y, w, h = coco_masks.toBbox(coco_masks.frPyObjects(mask, *mask["size"]) if is_list else mask)
    return [[x, y, x + w, y, x + w, y + h, x, y + h]]


def _faults_of(annotation: Mapping[str, Any], size: tuple[Any, Any]) -> list[str]:
    """The faults of one annotation, in an image of this height and width; None if unknown."""
    faults = []
    mode = annotation.get("bbox_mode", _XYWH)  # COCO's own
    if fault := _fault_of_box(annotation.get("bbox"), mode, *size):
        faults.append(fault)
    segmentation = annotation.get("segmentation")
    if isinstance(segmentation, dict):
        faults.append("rle")
    if fault := _fault_of_segmentation(segmentation, *size):
        faults.append(fault)
    keypoints = annotation.get("keypoints")
    if keypoints is None or not len(keypoints):
        faults.append("no_keypoints")
    return faults


def _fault_of_box(box: Any, mode: Any, height: Optional[float], width: Optional[float]) -> str:
    """The fault of a box in an image of this size, in pixels, or of unknown size.

    Returns:
        str: "" without a fault. "corners_box" leaves its image, and would lie in it as corners.
        :func:`complaints_about_boxes` has the meaning of the others.
    """
    try:
        if not math.isfinite(sum(box)):
            return "nan_box"
        x, y, w, h = box[:4]
        if mode in _CORNERS:
            w, h = w - x, h - y
    except (LookupError, OverflowError, TypeError, ValueError):
        return "no_box"
    if w < 0 or h < 0:
        return "negative_box"
    if w <= _EMPTY or h <= _EMPTY:
        return "empty_box"
    if mode not in _IN_PIXELS:  # rotated, or relative
        return ""
    if w < _TINY and h < _TINY:
        return "fraction_box" if min(box) >= 0 and max(box) <= 1 else "tiny_box"
    is_huge = w >= FAR or h >= FAR or not -FAR < x < FAR or not -FAR < y < FAR
    if is_huge or height is None or width is None:
        return "huge_box" if is_huge else ""
    over_x = _OVER_EDGE * width + _OVER_EDGE_PIXELS
    over_y = _OVER_EDGE * height + _OVER_EDGE_PIXELS
    right = width + over_x
    lower = height + over_y
    if x >= -over_x and y >= -over_y and x + w <= right and y + h <= lower:
        return ""
    is_inside = 0 <= x < w <= right and 0 <= y < h <= lower
    return "corners_box" if is_inside and mode == _XYWH else "outside_box"


def complaints_about_boxes(
    cases: Mapping[str, Case], num_objects: int
) -> Iterator[tuple[Case, str]]:
    """Each fault of boxes with a line that gives its number, three examples, and its likely cause.

    Args:
        cases: those of an :class:`AnnotationSummary`.
        num_objects: number of objects with and without a fault.
    """
    left_out = "Detectron2's mapper drops them silently"
    texts = {
        "nan_box": f"boxes have a NaN or infinity. {left_out}",
        "negative_box": f"boxes have a negative width or height. {left_out}. Is bbox_mode right?",
        "empty_box": f"boxes have no area. {left_out}",
        "no_box": "objects have a bbox that is not four numbers. Training stops when one is loaded",
        "huge_box": "boxes are larger than a million pixels, or that far away. A number is wrong",
        "fraction_box": "boxes have numbers from 0 to 1, but the format is in pixels. Multiply "
        "them by the image's width and height",
        "tiny_box": "boxes are smaller than 2 pixels. Were they drawn on images of another size?",
        "corners_box": "boxes exceed their image, but would fit it as [x0, y0, x1, y1]. The "
        "format is [x, y, width, height]: convert them, or set bbox_mode",
        "outside_box": "boxes exceed their image. Detectron2's mapper clips them at the edge. "
        "Were they drawn on images of another size, or is width swapped with height?",
    }
    for fault, text in texts.items():
        if case := cases.get(fault):
            yield (
                case,
                f"{case.number} of {num_objects} {text}. For example: {'; '.join(case.examples)}",
            )


def complaints_about_labels(cfg: CfgNode, summary: AnnotationSummary) -> Iterator[tuple[str, str]]:
    """Each fault of masks and keypoints that the model learns, with a line about it."""
    texts = {
        **(_MASKS if cfg.MODEL.MASK_ON else {}),
        **(_CODES if cfg.MODEL.MASK_ON and cfg.INPUT.MASK_FORMAT == "polygon" else {}),
        **(_KEYPOINTS if cfg.MODEL.KEYPOINT_ON else {}),
    }
    for fault, text in texts.items():
        if case := summary.case(fault):
            first = "; ".join(case.examples)
            yield fault, text.format(number=case.number, total=summary.num_objects, first=first)


def check_boxes(summary: AnnotationSummary, where: str = "") -> None:
    """Raise :class:`DataError` if more than half of the boxes have the same fault.

    Args:
        where: the start of the message.
    """
    for case, complaint in complaints_about_boxes(summary.cases, summary.num_objects):
        if 2 * case.number > summary.num_objects:
            raise DataError(where + complaint)


def check_crowd(summary: AnnotationSummary) -> None:
    """Raise :class:`DataError` if an image has more objects than training can compare."""
    if summary.most_objects > _MOST_OBJECTS:
        raise DataError(
            f"the image {summary.most_crowded} has {summary.most_objects:,} objects, and training "
            f"compares each with each anchor: more than {_MOST_OBJECTS:,} take all memory. Cut it "
            "into tiles, as projects/TiledImages does, or remove it from the dataset"
        )


def check_masks(cfg: CfgNode, summary: AnnotationSummary, where: str = "") -> None:
    """Raise :class:`DataError` for a polygon that would take all of the machine's RAM, and for
    faults of :data:`TOLERABLE` if more than half of the masks have one.
    """
    bad = summary.case("bad_polygon")
    if bad and cfg.MODEL.MASK_ON:
        raise DataError(
            f"{where}{bad.number} of {summary.num_objects} objects have a polygon with a corner "
            "that is NaN, infinite, beyond a million pixels or not a number; the first is "
            f"{bad.first}. Drawing it would take all RAM: correct or remove them, or set "
            "MODEL.MASK_ON False"
        )
    for fault, complaint in complaints_about_labels(cfg, summary):
        if fault in TOLERABLE and 2 * summary.case(fault).number > summary.num_objects:
            raise DataError(where + complaint)


def _fault_of_segmentation(segmentation: Any, height: Any, width: Any) -> str:
    """The fault of a mask in a COCO file or a dataset dict.

    Returns:
        str: "" without a fault. "thin_mask" has only polygons of fewer than three corners.
        "odd_polygon" is an odd number of coordinates. "bad_polygon" is a NaN or a corner out of
        reach. "bad_rle" is an invalid run-length code, and "rle_size" one of another size than the
        image.
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
    except (OverflowError, TypeError):  # not lists of numbers, or of one that no float can hold
        return "bad_polygon"


def _fault_of_polygons(polygons: Sequence[Any]) -> str:
    """The fault of polygons; Detectron2 drops those of fewer than three corners."""
    fault = "thin_mask"
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
    if isinstance(counts, list):  # numbers of pixels, not compressed
        are_numbers = all(isinstance(n, int) and n >= 0 for n in counts)
        return are_numbers and sum(counts) == math.prod(code["size"])
    # Where the last number is cut off, pycocotools reads on (rleFrString).
    return isinstance(counts, (str, bytes)) and not (ord(counts[-1:] or b"P") - 48) & 0x20


def _is_out_of_reach(polygon: Any) -> bool:
    if isinstance(polygon, np.ndarray):
        return not bool(np.all(np.abs(polygon) < FAR))
    if math.hypot(*polygon) < FAR:  # the fastest check of all corners; False for NaN
        return False
    return not (math.isfinite(sum(polygon)) and max(map(abs, polygon)) < FAR)
