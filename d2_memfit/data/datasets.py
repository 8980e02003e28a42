# Copyright (c) the d2_memfit developers.
"""Datasets registered by their COCO files."""

import pickle
from typing import Any, Optional

import pycocotools.coco
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json
from detectron2.utils.file_io import PathManager
from pycocotools.coco import COCO

from ..common.checks import did_you_mean
from ..common.files import is_file
from ..common.patching import replaced_functions
from ..errors import ConfigError, DataError
from .coco_file import keypoint_names, read_json

__all__ = ["check_datasets", "keep_dicts", "register_coco"]

# The metadata of Detectron2's datasets that are paths.
_ANNOTATIONS = ("json_file", "panoptic_json")
_FILES = (*_ANNOTATIONS, "image_root", "panoptic_root", "sem_seg_root")


def register_coco(name: str, json_file: str, image_dir: str) -> None:
    """Register a dataset in COCO's instance format under a name that the user chooses.

    Raises:
        ConfigError: the name belongs to another dataset.
    """
    if name not in DatasetCatalog:
        DatasetCatalog.register(name, _CocoDataset(name, json_file, image_dir))
        MetadataCatalog.get(name).set(
            json_file=json_file, image_root=image_dir, evaluator_type="coco"
        )
    elif MetadataCatalog.get(name).get("json_file") != json_file:
        raise ConfigError(f"--coco {name}: there is another dataset of this name, choose a new one")


class _CocoDataset:
    """Loads dataset dicts, and the keypoint names that Detectron2 needs to flip images.

    Args:
        name, json_file, image_dir: as for :func:`register_coco`.
    """

    def __init__(self, name: str, json_file: str, image_dir: str) -> None:
        self._place = name, json_file, image_dir
        self._kept = b""

    def __call__(self) -> list[dict[str, Any]]:
        return pickle.loads(self._kept) if self._kept else self._load()

    def keep(self, coco: Optional[dict[str, Any]]) -> None:
        self._kept = b"" if coco is None else pickle.dumps(self._load(coco))

    def _load(self, coco: Optional[dict[str, Any]] = None) -> list[dict[str, Any]]:
        name, json_file, image_dir = self._place
        coco = read_json(name, json_file) if coco is None else coco

        def api_of(file: str) -> COCO:
            api = COCO()
            api.dataset = coco
            api.createIndex()
            return api

        with replaced_functions([pycocotools.coco], {"COCO": lambda original: api_of}):
            dicts = load_coco_json(json_file, image_dir, name)
        if any("keypoints" in a for d in dicts for a in d["annotations"]):
            names = keypoint_names(coco)
            swaps = {"left": "right", "Left": "Right", "LEFT": "RIGHT"}
            pairs = [(n, n.replace(s, swaps[s])) for n in names for s in swaps if s in n]
            pairs = [pair for pair in pairs if pair[1] in names]
            MetadataCatalog.get(name).set(keypoint_names=names, keypoint_flip_map=pairs)
        return dicts


def keep_dicts(name: str, coco: Optional[dict[str, Any]]) -> None:
    """Keep the dicts of a file that was read for its check, so that it is not read again.

    Args:
        name: name of a dataset. Nothing is kept unless :func:`register_coco` has registered it.
        coco: the content; None frees the memory.
    """
    dataset = DatasetCatalog[name]
    if isinstance(dataset, _CocoDataset):
        dataset.keep(coco)


def check_datasets(cfg: CfgNode, eval_only: bool = False) -> None:
    """Check that the config's datasets are registered and their annotation files exist.

    Raises:
        ConfigError: a name is not registered, or there is no training dataset.
        DataError: an annotation file does not exist, or is a pipe. The message names all of them.
    """
    if not eval_only and not cfg.DATASETS.TRAIN:
        raise ConfigError("DATASETS.TRAIN is empty: name a dataset to train on")
    used = {"DATASETS.TEST": cfg.DATASETS.TEST}
    if not eval_only:
        used["DATASETS.TRAIN"] = cfg.DATASETS.TRAIN
    named = [(key, name) for key, names in used.items() for name in names]
    known = DatasetCatalog.list()
    unknown = [
        f"{key} names {name!r}, but there is no such dataset{did_you_mean(name, known)}"
        for key, name in named
        if name not in known
    ]
    if unknown:
        raise ConfigError(
            f"{'. '.join(unknown)}. Register each, for example with --coco NAME JSON IMAGE_DIR"
        )
    lacks_annotations = False
    missing: dict[str, list[str]] = {}
    for key, name in named:
        metadata = MetadataCatalog.get(name)
        for part in _FILES:
            path = metadata.get(part)
            if path and not (is_file(path) or PathManager.isdir(path)):
                missing.setdefault(f"{key} {name}", []).append(path)
                lacks_annotations |= part in _ANNOTATIONS
    if lacks_annotations:  # images alone may be elsewhere, by absolute paths
        lists = [f"{name}: {', '.join(paths)}" for name, paths in missing.items()]
        raise DataError(
            f"files of the datasets do not exist, or are pipes. {'. '.join(lists)}. Built-in "
            "datasets are looked for in the folder that DETECTRON2_DATASETS names, ./datasets by "
            "default"
        )
