# Copyright (c) the d2_memfit developers.
"""The content of a COCO file, and checks that Detectron2 can work with it."""

import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from ..common.errors import DataError
from ..common.files import load_json
from .faults import Summary, check, look_at_annotations, look_at_images

__all__ = ["CocoFile", "check_coco_file", "keypoint_names"]


def _are_numbers(values: Any) -> bool:
    """Whether it is a list of finite numbers."""
    try:
        are_of_types = {int, float}.issuperset(map(type, values))
        return isinstance(values, list) and are_of_types and math.isfinite(sum(values))
    except (OverflowError, TypeError):  # an integer that no float can hold
        return False


# What the fields that Detectron2 and pycocotools read must be. The first tests are for ids.
_ID = (lambda v: type(v) in (int, str), "an integer or a text")
_TEXT = (lambda v: isinstance(v, str), "a text")
_PIXELS = (lambda v: type(v) in (int, float) and 0 < v < math.inf, "a number of pixels")
_BOX = (lambda v: _are_numbers(v) and len(v) == 4, "[x, y, width, height]")
_FIELDS: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    "images": {"id": _ID, "file_name": _TEXT, "height": _PIXELS, "width": _PIXELS},
    "annotations": {"id": _ID, "image_id": _ID, "category_id": _ID, "bbox": _BOX},
    "categories": {"id": _ID, "name": _TEXT},
}


@dataclass(frozen=True)
class CocoFile:
    """A checked COCO file. Objects are annotations that are not crowds.

    Attributes:
        name, json_file: name and file of the dataset, as for ``register_coco``.
        summary: summary of its annotations and images.
        keypoint_names: keypoint names of all categories with keypoints.
        content: what was read.
    """

    name: str
    json_file: str
    summary: Summary
    keypoint_names: Sequence[str]
    content: dict[str, Any]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the categories, in the order of Detectron2's class numbers."""
        ordered = sorted(self.content["categories"], key=lambda c: c["id"])
        return tuple(c["name"] for c in ordered)

    def without(self, fields: Sequence[str]) -> list[Any]:
        """Ids of annotations that pycocotools cannot evaluate: without an area or these fields."""
        annotations = self.content["annotations"]
        has = [a for a in annotations if a.get("iscrowd") is not None and {*fields} <= a.keys()]
        good = {a["id"] for a in has if _are_numbers([a.get("area")])}
        return [a["id"] for a in annotations if a["id"] not in good]

    @property
    def odd_keypoints(self) -> list[Any]:
        """Ids of objects whose keypoints are not three numbers for each name."""
        num = 3 * len(self.keypoint_names)
        objects = [a for a in self.content["annotations"] if a.get("iscrowd", 0) == 0]
        kinds = {bool, int, float}
        points = {a["id"]: a["keypoints"] for a in objects}
        return [i for i, p in points.items() if len(p) != num or not kinds.issuperset(map(type, p))]


def check_coco_file(
    name: str, json_file: str, image_dir: Optional[str], for_training: bool
) -> CocoFile:
    """Read a COCO file, and check the properties that Detectron2 relies on.

    Args:
        name, json_file, image_dir: as for :func:`register_coco`; without the folder, images are not
            checked.
        for_training: whether there must be objects to learn from. If not, annotations may be
            missing, as in COCO's test sets.

    Raises:
        DataError: the file is missing, is not a COCO file, or is empty; or its images are
            elsewhere.
    """
    coco = load_json(json_file, f"dataset {name}: ")
    if not isinstance(coco, dict):
        raise DataError(f"dataset {name}: {json_file} is not in COCO's format: it has no 'images'")
    if not for_training:
        coco.setdefault("annotations", [])
    for key in _FIELDS:
        _check_entries(f"dataset {name}: the list {key!r} of {json_file}", coco.get(key), key)
    if not coco["images"]:
        raise DataError(f"dataset {name} is empty: the list 'images' of {json_file} has no entries")
    annotations: dict[Any, list[Any]] = {image["id"]: [] for image in coco["images"]}
    categories = {c["id"] for c in coco["categories"]}
    for a in coco["annotations"]:
        for field, known in (("category_id", categories), ("image_id", annotations)):
            if a[field] not in known:
                raise DataError(
                    f"dataset {name}: in {json_file}, the annotation with id {a['id']} has the "
                    f"{field} {a[field]}, but nothing has that id"
                )
        annotations[a["image_id"]].append(a)
    images = [{**image, "annotations": annotations[image["id"]]} for image in coco["images"]]
    summary = look_at_annotations(images)
    if for_training and not summary.num_objects:
        raise DataError(
            f"dataset {name} is empty: {json_file} has no annotations, except of crowds, which are "
            "not trained on. To train on empty images: DATALOADER.FILTER_EMPTY_ANNOTATIONS False"
        )
    if image_dir is not None:
        for image in images:
            image["file_name"] = os.path.join(image_dir, image["file_name"])
        look_at_images(summary, images)
        check(summary, {"image"}, f"dataset {name}: ", in_file=True)
    return CocoFile(name, json_file, summary, keypoint_names(coco), coco)


def _check_entries(where: str, entries: Any, key: str) -> None:
    if not isinstance(entries, list):
        raise DataError(f"{where} is missing, so the file is not in COCO's format")
    fields = _FIELDS[key].keys()
    for entry in entries:
        if not isinstance(entry, dict) or not fields <= entry.keys():
            missing = fields - set(entry) if isinstance(entry, dict) else fields
            raise DataError(f"{where} has an entry without {', '.join(sorted(missing))}: {entry}")
    for field, (is_good, what) in _FIELDS[key].items():
        odd = next((e for e in entries if not is_good(e[field])), None)
        if odd is not None:
            of_entry = "" if what == _ID[1] else f" with the id {odd['id']}"
            text = f"{where} has the {field} {odd[field]!r}{of_entry}"
            raise DataError(f"{text}, which is not {what}")
        if len({type(entry[field]) for entry in entries if what == _ID[1]}) > 1:
            raise DataError(f"{where} has numbers and texts as {field}: use one type for all")
    for id_, number in Counter(entry["id"] for entry in entries).most_common(1):
        if number > 1:
            raise DataError(f"{where} has the id {id_} more than once")


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
    keypoints: Any = next((a["keypoints"] for a in coco["annotations"] if a.get("keypoints")), [])
    return [str(i) for i in range(len(keypoints) // 3)]
