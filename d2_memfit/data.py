"""Datasets by their COCO files, and what can be said of a dataset before training starts."""

import difflib
import json
import os

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.utils.file_io import PathManager

from .errors import ConfigError, DataError

__all__ = ["check_coco_file", "check_datasets", "register_coco"]


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
                near = difflib.get_close_matches(name, DatasetCatalog.list(), n=3)
                raise ConfigError(
                    f"{key} names {name!r}, and there is no such dataset"
                    + (f" (near: {', '.join(near)})" if near else "")
                    + ". Register it, for example with --coco NAME JSON IMAGE_DIR"
                )
            json_file = MetadataCatalog.get(name).get("json_file")
            if json_file and not PathManager.isfile(json_file):
                raise DataError(
                    f"{key} {name}: the annotation file {json_file} does not exist. Built-in "
                    "datasets are looked for in the folder that DETECTRON2_DATASETS names"
                )


def check_coco_file(name: str, json_file: str, image_dir: str) -> None:
    """Read a COCO file, and check that there are images and annotations in it.

    Raises:
        DataError: it is missing, is not such a file, or is empty; or its images are elsewhere.
    """
    try:
        with PathManager.open(json_file) as f:
            coco = json.load(f)
    except OSError as e:
        raise DataError(f"dataset {name}: cannot open {json_file} ({e.strerror})") from e
    except ValueError as e:
        raise DataError(f"dataset {name}: {json_file} is not valid JSON ({e})") from e
    for key in ("images", "annotations", "categories"):
        if not isinstance(coco, dict) or not isinstance(coco.get(key), list):
            raise DataError(f"dataset {name}: {json_file} has no list {key!r}, so it is not COCO's")
        if not coco[key]:
            raise DataError(
                f"dataset {name} is empty: the list {key!r} of {json_file} has no entries"
            )
    first_image = os.path.join(image_dir, str(coco["images"][0].get("file_name")))
    if not PathManager.isfile(first_image):
        raise DataError(f"dataset {name}: its first image {first_image} does not exist")
