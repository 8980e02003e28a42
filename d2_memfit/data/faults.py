# Copyright (c) the d2_memfit developers.
"""Faults of annotations and images: found in one pass, and one table of what each means."""

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from textwrap import shorten
from typing import Any, Optional

import numpy as np
from detectron2.config import CfgNode
from detectron2.config import get_cfg as get_detectron2_cfg
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.structures import BoxMode
from PIL import Image

from ..common.checks import fits, value_of
from ..common.errors import DataError, printable
from ..common.files import checked

__all__ = ["Case", "Summary", "check", "class_keys", "kinds_of", "look_at_annotations"]
__all__ += ["look_at_images", "names_in", "size_of_image", "warnings_about"]

# Pixels from which a polygon's corner must be an error. Drawing a polygon takes memory for each
# pixel on its border (rleFrPoly of pycocotools): 1e9 takes tens of GB, a NaN all RAM.
_FAR = 1_000_000
_XYWH = BoxMode.XYWH_ABS  # slow to look up
_CORNERS = (BoxMode.XYXY_ABS, BoxMode.XYXY_REL)
_IN_PIXELS = (BoxMode.XYXY_ABS, BoxMode.XYWH_ABS)
_EMPTY = 1e-5  # pixels; Detectron2's filter_empty_instances drops boxes up to this size
# How far a box may leave its image: objects at the edge are often drawn a little over it.
_OVER_EDGE = 0.05  # of the image's side
_OVER_EDGE_PIXELS = 2
_EXAMPLES = 3
_MOST_OPENED = 2000  # images: about a second on a local disk
_ORIENTATION = 0x0112  # the tag of EXIF
_STOPS = "Training stops when one is loaded"
_SIZE = "Were they drawn on images of another size"
# By meta architecture; "" if there is none. Classes of projects have an attribute instead.
_CLASS_KEYS = {
    "GeneralizedRCNN": "MODEL.ROI_HEADS.NUM_CLASSES",
    "PanopticFPN": "MODEL.ROI_HEADS.NUM_CLASSES",
    "RetinaNet": "MODEL.RETINANET.NUM_CLASSES",
    "ProposalNetwork": "",
    "SemanticSegmentor": "",
    "PanopticDeepLab": "",
}
# The table of faults. Each has a kind, which says what has it; kinds that a model does not learn
# are not checked. Then follows when it is an error, and not a warning: "always", "most" (if more
# than half of the objects have it), or "file" (in a COCO file, which is checked before training).
# Each line is what is said: {n} is the number of cases, and the remedy comes last.
_FAULTS = {
    ("box", "most"): {
        "bad_box": "{n} boxes have a NaN, an infinity or no area. Detectron2's mapper drops them "
        "silently. Is bbox_mode right?",
        "no_box": f"{{n}} objects have a bbox that is not four numbers. {_STOPS}",
        "fraction_box": "{n} boxes have numbers from 0 to 1, but the format is in pixels. Multiply "
        "them by the image's width and height",
        "bad_class": "{n} objects have a category_id that is not an integer from 0 up. " + _STOPS,
        "corners_box": "{n} boxes exceed their image, but would fit it as [x0, y0, x1, y1]. The "
        "format is [x, y, width, height]: convert them, or set bbox_mode",
        "outside_box": "{n} boxes exceed their image. Detectron2's mapper clips them at the edge. "
        f"{_SIZE}, or is width swapped with height?",
    },
    ("mask", "always"): {
        "bad_polygon": "{n} objects have a polygon with a corner that is NaN, infinite, beyond a "
        "million pixels or not a number. Drawing it would take all RAM: correct or remove them, or "
        "set MODEL.MASK_ON False",
    },
    ("mask", "file"): {
        "no_mask": "MODEL.MASK_ON is True, but {n} objects have no mask. Training drops them, and "
        "images that have no others, or stops. Add masks, use a config of COCO-Detection, or set "
        "MODEL.MASK_ON False",
        "bad_mask": "{n} masks are not polygons of pairs of numbers, and not run-length codes of "
        f"their image's size. {_STOPS}, or learns from them wrongly",
    },
    ("evaluated mask", "file"): {
        "odd_mask": "{n} objects have a first polygon of less than 3 points, or an image whose "
        "width or height is no integer. Evaluation stops at it: correct or remove them",
    },
    ("code", "file"): {
        "rle": "INPUT.MASK_FORMAT is polygon, but {n} masks are run-length codes. Set it to bitmask"
    },
    ("keypoints", "file"): {
        "no_keypoints": f"MODEL.KEYPOINT_ON is True, but {{n}} objects have no keypoints. {_STOPS}"
    },
    ("image", "file"): {
        "missing": "{n} images do not exist. Correct their names or folder",
        "unreadable": f"{{n}} opened images cannot be decoded. {_STOPS}",
        "size": "{n} opened images have another size than their dict says. Detectron2 rotates "
        f"photographs as their EXIF data say. {_STOPS}",
    },
}


@dataclass
class Case:
    """The number of objects or images with the same fault, and the places of the first three."""

    number: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class Summary:
    """A summary of a dataset. Objects are annotations that are not crowds.

    Attributes:
        num_images, num_objects: totals over all dicts.
        num_images_with_objects: number of images that have any.
        num_opened: number of images whose files were opened.
        cases: cases of each fault that occurs.
        classes: number and places of objects by ``category_id``.
    """

    num_images: int = 0
    num_objects: int = 0
    num_images_with_objects: int = 0
    num_opened: int = 0
    cases: dict[str, Case] = field(default_factory=dict)
    classes: dict[int, Case] = field(default_factory=dict)

    def lines(self, kinds: Collection[str]) -> Iterator[tuple[str, Case, str]]:
        """For each fault of these kinds: when it is an error, its cases, and a line about it."""
        for (kind, error), texts in _FAULTS.items():
            for fault in [f for f in texts if f in self.cases and kind in kinds]:
                case = self.cases[fault]
                total = self.num_images if kind == "image" else self.num_objects
                n = f"{case.number} of {total}"
                yield error, case, f"{texts[fault].format(n=n)}: {'; '.join(case.examples)}"


def kinds_of(cfg: CfgNode) -> set[str]:
    """The kinds of faults of annotations that matter for what a model learns."""
    masks = {"mask", "code"} if cfg.INPUT.MASK_FORMAT == "polygon" else {"mask"}
    keypoints = {"keypoints"} if cfg.MODEL.KEYPOINT_ON else set()
    return {"box"} | (masks if cfg.MODEL.MASK_ON else set()) | keypoints


def check(summary: Summary, kinds: set[str], where: str = "", in_file: bool = False) -> None:
    """Raise :class:`DataError` for the first fault that is an error.

    Args:
        kinds: kinds of faults that matter.
        where: the start of the message.
        in_file: whether it is of a COCO file, which the user can correct before training.
    """
    for error, case, line in summary.lines(kinds):
        is_most = 2 * case.number > summary.num_objects
        if {"always": True, "most": is_most, "file": in_file}.get(error):
            raise DataError(where + line)


def warnings_about(
    cfg: Optional[CfgNode], summary: Summary, class_names: Optional[Sequence[str]]
) -> list[str]:
    """Warnings, with counts, about data that trains wrongly or ends training later.

    Args:
        cfg: tells what the model learns; None if unknown.
        class_names: class names of the dataset, if known.
    """
    learnt = {"box"} if cfg is None else kinds_of(cfg)
    warnings = [line for *_, line in summary.lines({"image", *learnt})]
    if cfg is None or not (keys := class_keys(cfg)):
        return warnings
    num_classes = value_of(cfg, keys[0])
    if outside := {c: n for c, n in summary.classes.items() if c >= num_classes}:
        number = sum(case.number for case in outside.values())
        warnings.append(
            f"{number} of {summary.num_objects} objects have a category_id outside 0 to "
            f"{num_classes - 1} ({names_in(map(str, outside))}), while {keys[0]} is "
            f"{num_classes}. Training takes them as background, or stops: "
            f"{next(iter(outside.values())).examples[0]}"
        )
    if class_names is not None and len(class_names) != num_classes:
        warnings.append(
            f"{keys[0]} is {num_classes}, but the dataset has {len(class_names)} classes "
            f"({names_in(class_names)}). Set the key to that number"
        )
    return warnings


def look_at_annotations(dicts: Iterable[Mapping[str, Any]]) -> Summary:
    """Check Detectron2's dataset dicts: about 5 s of CPU for COCO's 860,000 annotations."""
    summary = Summary()
    for image in dicts:
        annotations = image.get("annotations", ())
        num = sum([a.get("iscrowd", 0) == 0 for a in annotations])
        summary.num_images += 1
        summary.num_objects += num
        summary.num_images_with_objects += num > 0
        name = image.get("file_name", image.get("image_id"))
        size = image.get("height"), image.get("width")
        for number, annotation in enumerate(annotations):
            if annotation.get("iscrowd", 0) != 0:  # not trained on; Detectron2 takes None so, too
                continue
            category, points = annotation.get("category_id"), annotation.get("keypoints")
            has_class = isinstance(category, Integral) and int(category) >= 0
            faults = [
                _fault_of_box(annotation.get("bbox"), annotation.get("bbox_mode", _XYWH), *size),
                _fault_of_mask(annotation.get("segmentation"), *size),
                "" if hasattr(points, "__len__") and len(points) else "no_keypoints",
                "" if has_class else "bad_class",
            ]
            for fault in filter(None, faults):
                count(summary.cases, fault, name, annotation, number)
            if has_class:
                count(summary.classes, int(category), name, annotation, number)
    return summary


def count(
    cases: dict[Any, Case], key: Any, image: Any, annotation: Any = None, number: int = 0
) -> None:
    """Count a case, and name the first ones: an image, or the annotation with this number in it."""
    case = cases.get(key) or cases.setdefault(key, Case())
    case.number += 1
    if case.number <= _EXAMPLES:
        if annotation is not None:
            # Detectron2's dicts have no annotation ids, unless a project adds them.
            who = f"id {annotation['id']}" if "id" in annotation else f"object {number}"
            image = f"{who} of {image}, bbox {annotation.get('bbox')}"
        case.examples.append(printable(image))


def _fault_of_box(box: Any, mode: Any, height: Optional[float], width: Optional[float]) -> str:
    try:
        is_finite = math.isfinite(sum(box))
        x, y, w, h = box[:4]
        if mode in _CORNERS:
            w, h = w - x, h - y
    except (LookupError, OverflowError, TypeError, ValueError):
        return "no_box"
    if not is_finite or w <= _EMPTY or h <= _EMPTY:
        return "bad_box"
    if mode not in _IN_PIXELS:  # rotated, or relative
        return ""
    if min(box) >= 0 and max(box) <= 1:
        return "fraction_box"
    if height is None or width is None:
        return ""
    over_x = _OVER_EDGE * width + _OVER_EDGE_PIXELS
    over_y = _OVER_EDGE * height + _OVER_EDGE_PIXELS
    right, lower = width + over_x, height + over_y
    if x >= -over_x and y >= -over_y and x + w <= right and y + h <= lower:
        return ""
    is_inside = 0 <= x < w <= right and 0 <= y < h <= lower
    return "corners_box" if is_inside and mode == _XYWH else "outside_box"


def _fault_of_mask(mask: Any, height: Optional[float], width: Optional[float]) -> str:
    if isinstance(mask, np.ndarray):  # of pixels
        return ""
    if isinstance(mask, dict):
        return "rle" if _is_run_length_code(mask, height, width) else "bad_mask"
    if not mask:
        return "no_mask"
    if not isinstance(mask, (list, tuple)):
        return "bad_polygon"
    try:
        polygons = [polygon for polygon in mask if len(polygon) >= 6]  # Detectron2 drops others
        if any(map(_is_out_of_reach, polygons)):
            return "bad_polygon"
    except (OverflowError, TypeError):  # not lists of numbers, or of one that no float can hold
        return "bad_polygon"
    if any(len(polygon) % 2 for polygon in polygons):
        return "bad_mask"
    return "odd_mask" if len(mask[0]) < 5 or float in (type(height), type(width)) else ""


def _is_out_of_reach(polygon: Any) -> bool:
    if math.hypot(*polygon) < _FAR:  # the fastest check of all corners; False for NaN
        return False
    return not all(-_FAR < number < _FAR for number in polygon)


def _is_run_length_code(mask: dict[str, Any], height: Any, width: Any) -> bool:
    size: Any = mask.get("size")
    counts = mask.get("counts")
    if not fits(size, tuple[int, int]) or (height is not None and [*size] != [height, width]):
        return False
    if isinstance(counts, list):  # numbers of pixels, not compressed
        are_numbers = all(isinstance(n, int) and n >= 0 for n in counts)
        return are_numbers and sum(counts) == math.prod(size)
    # Where the last number is cut off, pycocotools reads on (rleFrString).
    return isinstance(counts, (str, bytes)) and not (ord(counts[-1:] or b"P") - 48) & 0x20


def look_at_images(summary: Summary, dicts: Sequence[Mapping[str, Any]]) -> None:
    """Count faults of image files. All must exist; up to 2,000 are opened, evenly spread.

    Args:
        dicts: each with ``file_name``, and with ``height`` and ``width`` after EXIF, if known.
            Files of the form ``scheme://`` are not looked at.
    """
    if dicts and dicts[0]["file_name"].partition("://")[0].isalnum():
        return
    images = [image for image in dicts if os.path.isfile(image["file_name"])]
    there = {image["file_name"] for image in images}
    for file in [d["file_name"] for d in dicts if d["file_name"] not in there]:
        count(summary.cases, "missing", file)
    for image in images[:: 1 + len(images) // _MOST_OPENED]:
        summary.num_opened += 1
        file, expected = image["file_name"], (image.get("width"), image.get("height"))
        try:
            size = size_of_image(file)
        except Exception as e:  # PIL raises SyntaxError and others, not only OSError
            count(summary.cases, "unreadable", f"{file} ({type(e).__name__}: {e})")
            continue
        if None not in expected and size != expected:
            text = f"{file} has {size} pixels of width and height, but its entry says {expected}"
            count(summary.cases, "size", text)


def size_of_image(file: str) -> tuple[int, int]:
    """Width and height of an image as Detectron2 loads it.

    Raises:
        Exception: of many types, if it is not an image.
    """
    with Image.open(checked(file)) as image:
        width, height = image.size
        # For a PNG, PIL would decode the image to look for EXIF, which is rare there.
        asks = image.format != "PNG" or "exif" in image.info
        is_on_its_side = asks and image.getexif().get(_ORIENTATION) in (5, 6, 7, 8)
    return (height, width) if is_on_its_side else (width, height)


def class_keys(cfg: CfgNode) -> Optional[list[str]]:
    """The keys with the number of classes.

    They are the key of the meta architecture, which a project's class names in an attribute
    ``num_classes_key``, and the keys MODEL.<...>.NUM_CLASSES that a project has added.

    Returns:
        None if unknown; an empty list if the model does not predict classes.
    """
    name = cfg.MODEL.META_ARCHITECTURE
    key: Optional[str] = _CLASS_KEYS.get(name)
    if key is None and name in META_ARCH_REGISTRY:
        key = getattr(META_ARCH_REGISTRY.get(name), "num_classes_key", None)
    if key == "":
        return []
    own = cfg.MODEL.keys() - get_detectron2_cfg().MODEL.keys()
    nodes = [node for node in cfg.MODEL if node in own and isinstance(cfg.MODEL[node], CfgNode)]
    added = [f"MODEL.{node}.NUM_CLASSES" for node in nodes if "NUM_CLASSES" in cfg.MODEL[node]]
    return [key, *added] if key else added or None


def names_in(names: Iterable[str]) -> str:
    """Names for a message, which may be cut."""
    return shorten(", ".join(names), 60, placeholder=" ...")
