# Copyright (c) the d2_memfit developers.
"""Datasets registered by their COCO files, and evaluated with pycocotools."""

import logging
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json
from detectron2.evaluation import COCOEvaluator
from detectron2.utils.logger import log_first_n

from ..common.checks import did_you_mean
from ..common.errors import ConfigError, DataError
from ..common.files import is_file, load_json
from ..common.patching import with_original
from .coco_file import keypoint_names

__all__ = ["check_datasets", "register_coco", "unique_annotation_ids"]


def register_coco(name: str, json_file: str, image_dir: str) -> None:
    """Register a dataset in COCO's instance format under a name that the user chooses.

    Raises:
        ConfigError: the name belongs to another dataset.
    """
    metadata = MetadataCatalog.get(name)
    if name not in DatasetCatalog:
        DatasetCatalog.register(name, partial(_load, name, json_file, image_dir))
        metadata.set(json_file=json_file, image_root=image_dir, evaluator_type="coco")
    elif metadata.get("json_file") != json_file:
        raise ConfigError(f"--coco {name}: there is another dataset of this name, choose a new one")


def _load(name: str, json_file: str, image_dir: str) -> list[dict[str, Any]]:
    """Load dataset dicts, and the keypoint names that Detectron2 needs to flip images."""
    dicts: list[dict[str, Any]] = load_coco_json(json_file, image_dir, name)
    if any("keypoints" in a for d in dicts for a in d["annotations"]):
        names = keypoint_names(load_json(json_file))
        swaps = {"left": "right", "Left": "Right", "LEFT": "RIGHT"}
        pairs = [(n, n.replace(s, swaps[s])) for n in names for s in swaps if s in n]
        pairs = [pair for pair in pairs if pair[1] in names]
        MetadataCatalog.get(name).set(keypoint_names=names, keypoint_flip_map=pairs)
    return dicts


def check_datasets(cfg: CfgNode, eval_only: bool = False) -> None:
    """Check that the config's datasets are registered and their annotation files exist.

    Raises:
        ConfigError: a name is not registered, or there is no training dataset.
        DataError: an annotation file does not exist, or is a pipe. The message names all of them.
    """
    if not eval_only and not cfg.DATASETS.TRAIN:
        raise ConfigError("DATASETS.TRAIN is empty: name a dataset to train on")
    keys = ["TEST"] if eval_only else ["TEST", "TRAIN"]
    named = [(f"DATASETS.{key}", name) for key in keys for name in cfg.DATASETS[key]]
    unknown = [
        f"{key} names {name!r}, but there is no such dataset"
        f"{did_you_mean(name, DatasetCatalog.list())}"
        for key, name in named
        if name not in DatasetCatalog
    ]
    if unknown:
        advice = "Register each, for example with --coco NAME JSON IMAGE_DIR"
        raise ConfigError(f"{'. '.join(unknown)}. {advice}")
    gone = [
        f"{key} {name}: {path}"
        for key, name in named
        for part in ("json_file", "panoptic_json")
        if (path := MetadataCatalog.get(name).get(part)) and not is_file(path)
    ]
    if gone:
        text = f"files of the datasets do not exist, or are pipes. {'. '.join(gone)}"
        advice = "Built-in datasets are in the folder DETECTRON2_DATASETS, by default ./datasets"
        raise DataError(f"{text}. {advice}")


def unique_annotation_ids() -> AbstractContextManager[Any]:
    """While open, ``COCOEvaluator`` numbers annotations from 1 if pycocotools needs that.

    ``COCOeval.evaluateImg`` writes the id of the matched annotation, or 0 for no match. ``COCO``
    finds annotations by their ids. So an object with the id 0 would count as missed.
    """
    # Projects make and derive evaluators themselves, in build_evaluator or test.
    return patch.object(COCOEvaluator, "evaluate", _numbering(COCOEvaluator.evaluate))


@with_original
def _numbering(evaluate: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    annotations = self._coco_api.dataset.get("annotations", [])
    ids = {a["id"] for a in annotations if isinstance(a["id"], int) and a["id"] > 0}
    if len(ids) < len(annotations):
        log_first_n(
            logging.WARNING,
            f"{self._metadata.get('json_file')}: annotation ids are not different integers "
            "from 1 up, which pycocotools needs. The evaluation uses new numbers",
            key="message",
        )
        for number, annotation in enumerate(annotations, 1):
            annotation["id"] = number
        self._coco_api.createIndex()
    return evaluate(self, *args, **kwargs)
