# Copyright (c) the d2_memfit developers.
"""The content of a COCO file, and checks that Detectron2 can work with it."""

import gc
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from detectron2.utils.file_io import PathManager

from ..common.files import is_file
from ..common.reading import load_json
from ..common.units import MB
from ..errors import DataError
from .annotations import AnnotationSummary, look_at_annotations
from .images import check_images

__all__ = ["CocoFile", "check_coco_file", "keypoint_names", "read_json"]

# The fields that Detectron2 reads in each entry of these lists of a COCO file.
_FIELDS = {
    "images": {"id", "file_name", "height", "width"},
    "annotations": {"id", "image_id", "category_id", "bbox"},
    "categories": {"id", "name"},
}
_NUMBERS = {int, float}
_PIXELS = (lambda n: type(n) in _NUMBERS and 0 < n < math.inf, "a number of pixels")
_TEXT = (lambda value: isinstance(value, str), "a text")
# Fields that Detectron2 and pycocotools read if they are there, and what they must be.
_VALUES: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    "images": {"file_name": _TEXT, "height": _PIXELS, "width": _PIXELS},
    "annotations": {
        "iscrowd": (lambda value: value in (0, 1), "0 or 1"),
        "keypoints": (
            lambda value: not value or (_are_numbers(value) and len(value) % 3 == 0),
            "a list of numbers, three for each keypoint",
        ),
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
_LARGE_BYTES = 50 * MB  # reading of larger files is slow enough for a message


@dataclass(frozen=True)
class CocoFile:
    """A checked COCO file. Objects are annotations that are not crowds.

    Attributes:
        name, json_file: name and file of the dataset, as for ``register_coco``.
        classes: names of the categories, in the order of Detectron2's class numbers.
        summary: summary of its annotations.
        without_area: ids of annotations that pycocotools cannot evaluate.
        keypoint_names: keypoint names of all categories with keypoints.
        content: what was read.
    """

    name: str
    json_file: str
    classes: tuple[str, ...]
    summary: AnnotationSummary
    without_area: Sequence[int]
    keypoint_names: tuple[str, ...]
    content: dict[str, Any]

    @property
    def has_masks(self) -> bool:
        """Whether Detectron2 uses at least one mask."""
        num_without = sum(self.summary.case(fault).number for fault in ("no_mask", "thin_mask"))
        return num_without < self.summary.num_objects


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
    is_there = is_file(json_file)
    num_bytes = os.path.getsize(PathManager.get_local_path(json_file)) if is_there else 0
    is_large = num_bytes > _LARGE_BYTES
    if is_large:
        progress(f"Reading {json_file}, {num_bytes / MB:.0f} MB ...")
    # Garbage collection would scan all objects again and again while they are made. For a file of
    # COCO's size, this takes twice as long as the rest.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        coco = read_json(name, json_file)
        file = _check(name, json_file, coco, image_dir, for_training)
    finally:
        if was_enabled:
            gc.enable()
    if is_large:
        progress(
            f"{json_file}: {file.summary.num_objects:,} objects of {file.summary.num_images:,} "
            f"images checked in {time.perf_counter() - start:.1f} s"
        )
    return file


def _check(
    name: str, json_file: str, coco: dict[str, Any], image_dir: Optional[str], for_training: bool
) -> CocoFile:
    if not for_training:
        coco.setdefault("annotations", [])
    for key in _FIELDS:
        _check_entries(f"dataset {name}: the list {key!r} of {json_file}", coco.get(key), key)
    if not coco["images"]:
        raise DataError(f"dataset {name} is empty: the list 'images' of {json_file} has no entries")
    _check_references(name, json_file, coco)
    summary = _summary_of(coco)
    if for_training and not summary.num_objects:
        raise DataError(
            f"dataset {name} is empty: {json_file} has no annotations, except of crowds, which are "
            "not trained on. To train on empty images: DATALOADER.FILTER_EMPTY_ANNOTATIONS False"
        )
    if image_dir is not None:
        check_images(name, coco["images"], image_dir)
    return CocoFile(
        name=name,
        json_file=json_file,
        classes=tuple(c["name"] for c in sorted(coco["categories"], key=lambda c: c["id"])),
        summary=summary,
        without_area=[
            a["id"]
            for a in coco["annotations"]
            if not ("iscrowd" in a and _are_numbers([a.get("area")]))
        ],
        keypoint_names=tuple(keypoint_names(coco)),
        content=coco,
    )


def read_json(name: str, json_file: str) -> dict[str, Any]:
    """Read the content of a dataset's file.

    Raises:
        DataError: it cannot be read, or is not a mapping.
    """
    coco = load_json(json_file, f"dataset {name}: ")
    if not isinstance(coco, dict):
        raise DataError(f"dataset {name}: {json_file} is not in COCO's format: it has no 'images'")
    return coco


def keypoint_names(coco: dict[str, Any]) -> list[str]:
    """Keypoint names of the categories; numbers if the categories name none.

    Raises:
        DataError: categories have different keypoints.
    """
    lists = [c["keypoints"] for c in coco["categories"] if c.get("keypoints")]
    if any(names != lists[0] for names in lists):
        raise DataError(
            "categories have different keypoints, but Detectron2's models have one list for all: "
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
        raise DataError(f"{where} is missing, so the file is not in COCO's format")
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
    twice = _first_twice([entry["id"] for entry in entries])
    if twice is not None:
        raise DataError(f"{where} has the id {twice} more than once")


def _are_numbers(values: Any) -> bool:
    """Whether it is a list of finite numbers."""
    try:
        are_of_types = _NUMBERS.issuperset(map(type, values))
        return isinstance(values, list) and are_of_types and math.isfinite(sum(values))
    except (OverflowError, TypeError):  # an integer that no float can hold
        return False


def _summary_of(coco: dict[str, Any]) -> AnnotationSummary:
    annotations: dict[Any, list[Any]] = {}
    for a in coco["annotations"]:
        annotations.setdefault(a["image_id"], []).append(a)
    return look_at_annotations(
        {**image, "annotations": annotations.get(image["id"], [])} for image in coco["images"]
    )


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
                    f"{field} {a[field]}, but nothing has that id"
                )
