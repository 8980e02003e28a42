# Copyright (c) the d2_memfit developers.
"""Faults of annotations and images: found in one pass, and one table of what each means."""

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Optional

import numpy as np
from detectron2.config import CfgNode
from detectron2.structures import BoxMode
from detectron2.utils.file_io import PathManager
from PIL import Image

from ..common.checks import value_of
from ..common.reading import checked
from ..errors import DataError, printable
from .classes import class_keys, names_in

__all__ = ["Case", "Summary", "check", "kinds_of", "look_at_annotations", "look_at_images"]
__all__ += ["size_of_image", "warnings_about"]

# Pixels from which a polygon's corner must be an error. Drawing a polygon takes memory for each
# pixel on its border (rleFrPoly of pycocotools): 1e9 takes tens of GB, a NaN all RAM.
_FAR = 1_000_000
_XYWH = BoxMode.XYWH_ABS  # slow to look up
_CORNERS = (BoxMode.XYXY_ABS, BoxMode.XYXY_REL)
_IN_PIXELS = (BoxMode.XYXY_ABS, BoxMode.XYWH_ABS)
_EMPTY = 1e-5  # pixels; Detectron2's filter_empty_instances drops boxes up to this size
_TINY = 2  # pixels
# How far a box may leave its image: objects at the edge are often drawn a little over it.
_OVER_EDGE = 0.05  # of the image's side
_OVER_EDGE_PIXELS = 2
_EXAMPLES = 3
_MOST_OPENED = 2000  # images: about a second on a local disk
_ORIENTATION = 0x0112  # the tag of EXIF
# Only these faults matter in crowds, which are not trained on, but drawn in an evaluation.
_FAULTS_OF_CROWDS = ("bad_polygon", "bad_rle", "odd_polygon", "rle_size")
# Objects in one image. Their masks and their comparison with 10,000 boxes take minutes and 20 GB.
_MOST_OBJECTS = 50_000

_DROPS = "Detectron2's mapper drops them silently"
_STOPS = "Training stops when one is loaded"
_SIZE = "Were they drawn on images of another size"
# The table of faults. Each has a kind, which says what has it; kinds that a model does not learn
# are not checked. Then follows when it is an error, and not a warning: "always", "most" (if more
# than half of the objects have it), "file" (in a COCO file, which is checked before training), or
# "never". Each line is what is said: {n} is the number of cases, and the remedy comes last.
_FAULTS = {
    ("box", "most"): {
        "nan_box": f"{{n}} boxes have a NaN or infinity. {_DROPS}",
        "negative_box": "{n} boxes have a negative width or height. "
        f"{_DROPS}. Is bbox_mode right?",
        "empty_box": f"{{n}} boxes have no area. {_DROPS}",
        "no_box": f"{{n}} objects have a bbox that is not four numbers. {_STOPS}",
        "fraction_box": "{n} boxes have numbers from 0 to 1, but the format is in pixels. Multiply "
        "them by the image's width and height",
        "tiny_box": f"{{n}} boxes are smaller than 2 pixels. {_SIZE}?",
        "corners_box": "{n} boxes exceed their image, but would fit it as [x0, y0, x1, y1]. The "
        "format is [x, y, width, height]: convert them, or set bbox_mode",
        "outside_box": "{n} boxes exceed their image. Detectron2's mapper clips them at the edge. "
        f"{_SIZE}, or is width swapped with height?",
    },
    ("class", "never"): {
        "bad_class": "{n} objects have a category_id that is not an integer from 0 up. " + _STOPS
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
        "rle_size": "{n} masks are run-length codes of another size than their image. Training "
        "stops, or learns from them wrongly",
        "bad_rle": "{n} masks are mappings without the size and counts of a run-length code. "
        f"{_STOPS}",
        "odd_polygon": f"{{n}} masks have a polygon with an odd number of coordinates. {_STOPS}",
    },
    ("code", "file"): {
        "rle": "INPUT.MASK_FORMAT is polygon, but {n} masks are run-length codes. Set it to bitmask"
    },
    ("keypoints", "file"): {
        "no_keypoints": f"MODEL.KEYPOINT_ON is True, but {{n}} objects have no keypoints. {_STOPS}"
    },
    ("crowd", "always"): {
        "crowded": f"{{n}} images have more than {_MOST_OBJECTS:,} objects. Training compares each "
        "with each anchor, which takes all memory. Cut them into tiles, as projects/TiledImages "
        "does, or remove them",
    },
    ("name", "file"): {"missing": "{n} images do not exist. Correct their names or folder"},
    ("image", "file"): {
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
        most_objects: the most objects in one image.
        cases: cases of each fault that occurs. Cases of masks include crowds.
        classes: number and places of objects by ``category_id``.
    """

    num_images: int = 0
    num_objects: int = 0
    num_images_with_objects: int = 0
    num_opened: int = 0
    most_objects: int = 0
    cases: dict[str, Case] = field(default_factory=dict)
    classes: dict[int, Case] = field(default_factory=dict)

    def lines(self, kinds: Collection[str]) -> Iterator[tuple[str, Case, str]]:
        """For each fault of these kinds: when it is an error, its cases, and a line about it."""
        totals = {"crowd": self.num_images, "name": self.num_images, "image": self.num_opened}
        for (kind, error), texts in _FAULTS.items():
            for fault in [f for f in texts if f in self.cases and kind in kinds]:
                case = self.cases[fault]
                n = f"{case.number} of {totals.get(kind, self.num_objects)}"
                yield error, case, f"{texts[fault].format(n=n)}: {'; '.join(case.examples)}"


def kinds_of(cfg: CfgNode) -> set[str]:
    """The kinds of faults of annotations that matter for what a model learns."""
    masks = {"mask", "code"} if cfg.INPUT.MASK_FORMAT == "polygon" else {"mask"}
    keypoints = {"keypoints"} if cfg.MODEL.KEYPOINT_ON else set()
    return {"box", "class"} | (masks if cfg.MODEL.MASK_ON else set()) | keypoints


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
    warnings = [line for *_, line in summary.lines({"name", "image", *learnt})]
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
        num = sum([not a.get("iscrowd", 0) for a in annotations])
        summary.num_images += 1
        summary.num_objects += num
        summary.num_images_with_objects += num > 0
        summary.most_objects = max(num, summary.most_objects)
        name = image.get("file_name", image.get("image_id"))
        if num > _MOST_OBJECTS:
            count(summary.cases, "crowded", f"{name}, {num:,} objects")
        size = image.get("height"), image.get("width")
        if not all(isinstance(side, (int, float)) for side in size):
            size = None, None
        for number, annotation in enumerate(annotations):
            category, points = annotation.get("category_id"), annotation.get("keypoints")
            has_class = isinstance(category, Integral) and int(category) >= 0
            faults = [
                _fault_of_box(annotation.get("bbox"), annotation.get("bbox_mode", _XYWH), *size),
                _fault_of_mask(annotation.get("segmentation"), *size),
                "no_keypoints" if points is None or not len(points) else "",
                "" if has_class else "bad_class",
            ]
            is_crowd = annotation.get("iscrowd", 0)
            for fault in filter(None, faults):
                if not is_crowd or fault in _FAULTS_OF_CROWDS:
                    count(summary.cases, fault, name, annotation, number)
            if has_class and not is_crowd:
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
        if not _is_run_length_code(mask.get("size"), mask.get("counts")):
            return "bad_rle"
        return "rle" if height is None or list(mask["size"]) == [height, width] else "rle_size"
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
    return "odd_polygon" if any(len(polygon) % 2 for polygon in polygons) else ""


def _is_out_of_reach(polygon: Any) -> bool:
    if math.hypot(*polygon) < _FAR:  # the fastest check of all corners; False for NaN
        return False
    return not all(-_FAR < number < _FAR for number in polygon)


def _is_run_length_code(size: Any, counts: Any) -> bool:
    is_pair = isinstance(size, (list, tuple)) and len(size) == 2
    if not is_pair or not all(isinstance(side, int) and side > 0 for side in size):
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
            Only the first of files of the form ``scheme://`` is looked for.
    """
    files = [image["file_name"] for image in dicts]
    if any("://" in file for file in files[:1]):  # each check is slow
        if not PathManager.isfile(files[0]):
            count(summary.cases, "missing", files[0])
        return
    folders = {os.path.dirname(file) for file in files}
    there = {f: set(os.listdir(f or ".")) if os.path.isdir(f or ".") else set() for f in folders}
    found = [os.path.basename(file) in there[os.path.dirname(file)] for file in files]
    for file in (file for file, is_there in zip(files, found) if not is_there):
        count(summary.cases, "missing", file)
    images = [image for image, is_there in zip(dicts, found) if is_there]
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
