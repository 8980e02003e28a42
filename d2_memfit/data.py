"""Datasets by their COCO files, and what can be said of a dataset before training starts."""

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any, Union

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.utils.file_io import PathManager

from .checks import near
from .errors import ConfigError, DataError

__all__ = ["add_coco_option", "check_coco_file", "check_datasets", "register_coco", "shorter_sides"]


def shorter_sides(value: Union[int, Sequence[int]]) -> tuple[int, ...]:
    """INPUT.MIN_SIZE_TRAIN or INPUT.MIN_SIZE_TEST: Detectron2 takes one number, or several."""
    return (value,) if isinstance(value, int) else tuple(value)


def add_coco_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--coco NAME JSON IMAGE_DIR``, whose values are for :func:`register_coco`."""
    parser.add_argument(
        "--coco",
        nargs=3,
        action="append",
        default=[],
        metavar=("NAME", "JSON", "IMAGE_DIR"),
        help="register a dataset in COCO's format under this name; may be repeated",
    )


def register_coco(name: str, json_file: str, image_dir: str) -> None:
    """Register a dataset in COCO's instance format under a name of the user's choice.

    Raises:
        ConfigError: the name belongs to another dataset.
    """
    if name not in DatasetCatalog:
        register_coco_instances(name, {}, json_file, image_dir)
    elif MetadataCatalog.get(name).get("json_file") != json_file:
        raise ConfigError(f"--coco {name}: there is another dataset of this name, choose a new one")


def check_datasets(cfg: CfgNode, eval_only: bool = False) -> None:
    """Check that the config's datasets are registered and their annotation files exist.

    Raises:
        ConfigError: a name is not registered, or there is none to train on.
        DataError: an annotation file does not exist.
    """
    if not eval_only and not cfg.DATASETS.TRAIN:
        raise ConfigError("DATASETS.TRAIN is empty: name a dataset to train on")
    used = {"DATASETS.TEST": cfg.DATASETS.TEST}
    if not eval_only:
        used["DATASETS.TRAIN"] = cfg.DATASETS.TRAIN
    for key, names in used.items():
        for name in names:
            if name not in DatasetCatalog:
                raise ConfigError(
                    f"{key} names {name!r}, and there is no such dataset"
                    f"{near(name, DatasetCatalog.list())}. Register it, for example with "
                    "--coco NAME JSON IMAGE_DIR"
                )
            json_file = MetadataCatalog.get(name).get("json_file")
            if json_file and not PathManager.isfile(json_file):
                raise DataError(
                    f"{key} {name}: the annotation file {json_file} does not exist. Built-in "
                    "datasets are looked for in the folder that DETECTRON2_DATASETS names"
                )


# What Detectron2 takes from each entry of these lists of a COCO file.
_FIELDS = {
    "images": {"id", "file_name", "height", "width"},
    "annotations": {"id", "image_id", "category_id", "bbox"},
    "categories": {"id", "name"},
}


def check_coco_file(name: str, json_file: str, image_dir: str, for_training: bool) -> None:
    """Read a COCO file, and check what Detectron2 relies on.

    Args:
        name, json_file, image_dir: as for :func:`register_coco`.
        for_training: there must be objects to learn from. Without, annotations may be missing, as
            in COCO's test sets.

    Raises:
        DataError: the file is missing, is no such file, or has nothing in it; or its images are
            elsewhere.
    """
    try:
        with PathManager.open(json_file) as f:
            coco = json.load(f)
    except OSError as e:
        raise DataError(f"dataset {name}: cannot open {json_file} ({e.strerror})") from e
    except ValueError as e:
        raise DataError(f"dataset {name}: {json_file} is not valid JSON ({e})") from e
    if not isinstance(coco, dict):
        raise DataError(f"dataset {name}: {json_file} is not COCO's format, it has no 'images'")
    if not for_training:
        coco.setdefault("annotations", [])
    for key in _FIELDS:
        _check_entries(f"dataset {name}: the list {key!r} of {json_file}", coco.get(key), key)
    if not coco["images"]:
        raise DataError(f"dataset {name} is empty: the list 'images' of {json_file} has no entries")

    categories = {c["id"] for c in coco["categories"]}
    images = {i["id"] for i in coco["images"]}
    for a in coco["annotations"]:
        for field, known in (("category_id", categories), ("image_id", images)):
            if a[field] not in known:
                raise DataError(
                    f"dataset {name}: in {json_file}, the annotation with id {a['id']} has the "
                    f"{field} {a[field]}, and there is nothing with that id"
                )
    if for_training and not any(not a.get("iscrowd", 0) for a in coco["annotations"]):
        raise DataError(
            f"dataset {name} is empty: {json_file} has no annotations but those of crowds, which "
            "are not trained on"
        )
    first_image = os.path.join(image_dir, str(coco["images"][0]["file_name"]))
    if not PathManager.isfile(first_image):
        raise DataError(f"dataset {name}: its first image {first_image} does not exist")


def _check_entries(where: str, entries: Any, key: str) -> None:
    if not isinstance(entries, list):
        raise DataError(f"{where} is missing, so it is not COCO's format")
    for entry in entries:
        missing = _FIELDS[key] - set(entry) if isinstance(entry, dict) else _FIELDS[key]
        if missing:
            raise DataError(f"{where} has an entry without {', '.join(sorted(missing))}: {entry}")
    ids = [entry["id"] for entry in entries]
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise DataError(f"{where} has the id {twice} more than once")
