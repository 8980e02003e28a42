# Copyright (c) the d2_memfit developers.
"""The content of a COCO file, and checks that Detectron2 can work with it."""

import gc
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Optional

from detectron2.structures import BoxMode
from detectron2.utils.file_io import PathManager

from ..errors import DataError
from .annotations import Case, count_case, fault_of_box, fault_of_segmentation
from .images import check_images

__all__ = ["CocoFile", "check_coco_file", "keypoint_names", "read_json"]

# The fields that Detectron2 reads in each entry of these lists of a COCO file.
_FIELDS = {
    "images": {"id", "file_name", "height", "width"},
    "annotations": {"id", "image_id", "category_id", "bbox"},
    "categories": {"id", "name"},
}
_TEXT = (lambda value: isinstance(value, str), "a text")
# Fields that Detectron2 and pycocotools read if they are there, and what they must be.
_VALUES: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    "images": {"file_name": _TEXT},
    "annotations": {
        "iscrowd": (lambda value: value in (0, 1), "0 or 1"),
        "keypoints": (lambda value: not value or _are_numbers(value), "a list of numbers"),
        "bbox": (lambda box: _are_numbers(box) and len(box) == 4, "[x, y, width, height]"),
    },
    "categories": {
        "name": _TEXT,
        "keypoints": (
            lambda value: isinstance(value, list) and all(isinstance(n, str) for n in value),
            "a list of names",
        ),
    },
}
_BAD_MASKS = ("bad_polygon", "bad_rle", "rle_size", "odd_polygon")
_LARGE_BYTES = 50 * 2**20  # from here on, reading is slow enough for a message


@dataclass(frozen=True)
class CocoFile:
    """A checked COCO file. Objects are annotations that are not crowds.

    Attributes:
        name, json_file: name and file of the dataset, as for ``register_coco``.
        classes: names of the categories, in the order of Detectron2's class numbers.
        num_images: number of images.
        num_images_with_objects: number of training images, if FILTER_EMPTY_ANNOTATIONS.
        num_objects: number of objects in all images.
        boxes: cases of objects whose boxes have a fault.
        without_area: ids of annotations that pycocotools cannot evaluate.
        without_mask: ids of objects without a segmentation.
        bad_masks: ids of objects, including crowds, whose masks cannot be drawn, or would take all
            RAM.
        has_masks: whether Detectron2 uses at least one mask.
        with_rle: ids of objects whose segmentation is a run-length code.
        without_keypoints: ids of objects without keypoints.
        keypoint_names: keypoint names of all categories with keypoints.
    """

    name: str
    json_file: str
    classes: tuple[str, ...]
    num_images: int
    num_images_with_objects: int
    num_objects: int
    boxes: dict[str, Case]
    without_area: Sequence[int]
    without_mask: Sequence[int]
    bad_masks: Sequence[int]
    has_masks: bool
    with_rle: Sequence[int]
    without_keypoints: Sequence[int]
    keypoint_names: tuple[str, ...]


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """While open, or in a function that it decorates, disable Python's garbage collection.

    It would scan all objects again and again while they are created. For a file of COCO's size,
    this takes twice as long as the rest.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_garbage_collection()
def check_coco_file(
    name: str,
    json_file: str,
    image_dir: Optional[str],
    for_training: bool,
    progress: Callable[[str], None] = lambda line: None,
) -> CocoFile:
    """Read a COCO file, and check the properties that Detectron2 relies on.

    Args:
        name, json_file, image_dir: as for :func:`register_coco`; without the folder, images are not
            checked.
        for_training: whether there must be objects to learn from. If not, annotations may be
            missing, as in COCO's test sets.
        progress: called with a line at the start and the end of a large file.

    Raises:
        DataError: the file is missing, is not a COCO file, or is empty; or its images are
            elsewhere.
    """
    start = time.perf_counter()
    is_file = PathManager.isfile(json_file)
    num_bytes = os.path.getsize(PathManager.get_local_path(json_file)) if is_file else 0
    is_large = num_bytes > _LARGE_BYTES
    if is_large:
        progress(f"Reading {json_file}, {num_bytes / 2**20:.0f} MB ...")
    coco = read_json(name, json_file)
    if not for_training:
        coco.setdefault("annotations", [])
    for key in _FIELDS:
        _check_entries(f"dataset {name}: the list {key!r} of {json_file}", coco.get(key), key)
    if not coco["images"]:
        raise DataError(f"dataset {name} is empty: the list 'images' of {json_file} has no entries")
    _check_references(name, json_file, coco)
    objects = [a for a in coco["annotations"] if not a.get("iscrowd", 0)]
    if for_training and not objects:
        raise DataError(
            f"dataset {name} is empty: {json_file} has no annotations but those of crowds, which "
            "are not trained on"
        )
    if image_dir is not None:
        check_images(name, coco["images"], image_dir)
    if is_large:
        progress(
            f"{json_file}: {len(coco['annotations']):,} annotations of {len(coco['images']):,} "
            f"images checked in {time.perf_counter() - start:.1f} s"
        )
    return CocoFile(
        name=name,
        json_file=json_file,
        classes=tuple(c["name"] for c in sorted(coco["categories"], key=lambda c: c["id"])),
        num_images=len(coco["images"]),
        num_images_with_objects=len({a["image_id"] for a in objects}),
        num_objects=len(objects),
        boxes=_cases_of_boxes(coco["images"], objects),
        without_area=[
            a["id"]
            for a in coco["annotations"]
            if not _are_numbers([a.get("area")]) or "iscrowd" not in a
        ],
        without_mask=[a["id"] for a in objects if not a.get("segmentation")],
        bad_masks=_bad_masks(coco),
        has_masks=any(_is_mask(a.get("segmentation")) for a in objects),
        with_rle=[a["id"] for a in objects if isinstance(a.get("segmentation"), dict)],
        without_keypoints=[
            a["id"] for a in objects if not a.get("keypoints") or len(a["keypoints"]) % 3
        ],
        keypoint_names=tuple(keypoint_names(coco)),
    )


def read_json(name: str, json_file: str) -> dict[str, Any]:
    """Read the content of a dataset's file.

    Raises:
        DataError: it cannot be read, or is not a mapping.
    """
    try:
        with PathManager.open(json_file) as f:
            coco = json.load(f)
    except OSError as e:
        raise DataError(f"dataset {name}: cannot open {json_file} ({e.strerror})") from e
    except (ValueError, RecursionError) as e:  # RecursionError: nested too deeply
        raise DataError(f"dataset {name}: {json_file} is not valid JSON ({e})") from e
    if not isinstance(coco, dict):
        raise DataError(f"dataset {name}: {json_file} is not COCO's format, it has no 'images'")
    return coco


def keypoint_names(coco: dict[str, Any]) -> list[str]:
    """Keypoint names of the categories; numbers if the categories name none.

    Raises:
        DataError: categories have different keypoints.
    """
    lists = [c["keypoints"] for c in coco["categories"] if c.get("keypoints")]
    if any(names != lists[0] for names in lists):
        raise DataError(
            "categories have different keypoints, and Detectron2's models have one list for all: "
            f"{lists[0]} and {next(names for names in lists if names != lists[0])}"
        )
    if lists:
        return list(lists[0])
    keypoints: list[float] = next(
        (a["keypoints"] for a in coco["annotations"] if a.get("keypoints")), []
    )
    return [str(i) for i in range(len(keypoints) // 3)]


def _check_entries(where: str, entries: Any, key: str) -> None:
    if not isinstance(entries, list):
        raise DataError(f"{where} is missing, so it is not COCO's format")
    fields = _FIELDS[key]
    for entry in entries:
        if not isinstance(entry, dict) or not fields <= entry.keys():
            missing = fields - set(entry) if isinstance(entry, dict) else fields
            raise DataError(f"{where} has an entry without {', '.join(sorted(missing))}: {entry}")
    for field in fields & {"id", "image_id", "category_id"}:
        types = {type(entry[field]) for entry in entries}
        if not types <= {int, str}:
            odd = next(e[field] for e in entries if type(e[field]) not in (int, str))
            raise DataError(f"{where} has the {field} {odd!r}, which is not an integer or a text")
        if len(types) > 1:
            raise DataError(f"{where} has numbers and texts as {field}: use one type for all")
    for field, (is_good, what) in _VALUES[key].items():
        odd = next((e for e in entries if field in e and not is_good(e[field])), None)
        if odd is not None:
            raise DataError(
                f"{where} has the {field} {odd[field]!r} with the id {odd['id']}, which is not "
                f"{what}"
            )
    if key == "images":
        odd = next((e for e in entries if not (_is_length(e["height"], e["width"]))), None)
        if odd is not None:
            raise DataError(
                f"{where} has the height {odd['height']!r} and width {odd['width']!r} with the id "
                f"{odd['id']}, which are not numbers of pixels"
            )
    twice = _first_twice([entry["id"] for entry in entries])
    if twice is not None:
        raise DataError(f"{where} has the id {twice} more than once")


def _are_numbers(values: Any) -> bool:
    """Whether it is a list of finite numbers."""
    try:
        types = set(map(type, values))
        return isinstance(values, list) and types <= {int, float} and math.isfinite(sum(values))
    except (OverflowError, TypeError):  # an integer that no float can hold
        return False


def _is_length(*numbers: Any) -> bool:
    return all(type(n) in (int, float) and 0 < n < math.inf for n in numbers)


def _is_mask(segmentation: Any) -> bool:
    """Whether Detectron2 uses a mask; it drops polygons of fewer than three corners."""
    if isinstance(segmentation, dict):
        return True
    polygons = segmentation if isinstance(segmentation, list) else []
    return any(isinstance(polygon, list) and len(polygon) >= 6 for polygon in polygons)


def _cases_of_boxes(images: list[Any], objects: list[Any]) -> dict[str, Case]:
    cases: dict[str, Case] = {}
    image_of = {image["id"]: image for image in images}
    for a in objects:
        image = image_of[a["image_id"]]
        fault = fault_of_box(a["bbox"], BoxMode.XYWH_ABS, image["height"], image["width"])
        if fault:
            count_case(cases, fault, image, 0, a)
    return cases


def _bad_masks(coco: dict[str, Any]) -> list[Any]:
    sizes = {i["id"]: (i["height"], i["width"]) for i in coco["images"]}
    return [
        a["id"]
        for a in coco["annotations"]
        if fault_of_segmentation(a.get("segmentation"), *sizes[a["image_id"]]) in _BAD_MASKS
    ]


def _first_twice(ids: list[Any]) -> Optional[Any]:
    if len(set(ids)) == len(ids):
        return None
    return next(i for i, count in Counter(ids).items() if count > 1)


def _check_references(name: str, json_file: str, coco: dict[str, Any]) -> None:
    known = {
        "category_id": {c["id"] for c in coco["categories"]},
        "image_id": {i["id"] for i in coco["images"]},
    }
    for field, ids in known.items():
        for a in coco["annotations"]:
            if a[field] not in ids:
                raise DataError(
                    f"dataset {name}: in {json_file}, the annotation with id {a['id']} has the "
                    f"{field} {a[field]}, and there is nothing with that id"
                )
