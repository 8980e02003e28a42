# Copyright (c) the d2_memfit developers.
"""Conversion of datasets of YOLO, Pascal VOC, Roboflow and COCO to COCO files for training."""

import json
import os
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple, Optional

from detectron2.config import get_cfg

from ..common.files import check_outputs, output_file
from ..common.zoo import detectron2_zoo
from ..errors import ConfigError, DataError
from .annotations import check_crowd, complaints_about_boxes, complaints_about_labels
from .coco_file import CocoFile, check_coco, read_json
from .dataset_settings import fit_to_data
from .hold_out import hold_out
from .label_files import PascalVoc, Split, Yolo, splits_of

__all__ = ["Conversion", "convert_dataset"]

_ROBOFLOW = "_annotations.coco.json"
_BOXES = "COCO-Detection/faster_rcnn_R_50_FPN_3x"
_MASKS = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x"


class Conversion(NamedTuple):
    """Checked COCO files with the folders of their images, lines to print, and a recipe."""

    files: list[tuple[CocoFile, Path]]
    notes: list[str]
    config: str
    opts: list[str]


def convert_dataset(source: Path, output: Path, held_out: Optional[float] = None) -> Conversion:
    """Write the splits of a dataset as ``output/train.json``, ``val.json`` and ``test.json``.

    Nothing is written unless the checks of training pass. Files in COCO's format stay where they
    are, unless images are held out. Images always stay where they are.

    Args:
        source: a folder with a ``data.yaml`` (YOLO), ``.xml`` files next to images or in
            ``Annotations`` (Pascal VOC), or folders with ``_annotations.coco.json`` (Roboflow); or
            a YAML file of YOLO, or a COCO file with its images next to it or in ``images``.
        output: folder, which is created if necessary.
        held_out: share of the images that becomes the split "val".

    Raises:
        ConfigError: there is no such folder, it has another layout, or images cannot be held out.
        DataError: a file in it cannot be read, or training would refuse the result.
    """
    try:
        splits = _splits(Path(os.path.abspath(source)))
    except OSError as e:
        raise DataError(f"--input {source} cannot be read ({e})") from e
    splits.sort(key=lambda split: split.name != "train")
    names = [split.name for split in splits]
    if names[:1] != ["train"] or len(set(names)) < len(names):
        there = ", ".join(names) or "none"
        raise ConfigError(f"--input {source} must have one split train, but has {there}")
    files = [_checked(split, output, split.image_dir) for split in splits]
    if held_out is not None:
        if "val" in names:
            raise ConfigError(f"--hold-out: {source} already has a split val. Leave the option out")
        splits[:1] = hold_out(splits[0], held_out)
        files[:1] = [_checked(split, output, None) for split in splits[:2]]
    paths = [{str(p.image_dir / image["file_name"]) for image in p.coco["images"]} for p in splits]
    for one, other in combinations(range(len(splits)), 2):
        text = f"images are also in {splits[one].name}, so results on them mean little"
        splits[other].note(text, *sorted(paths[one] & paths[other]))
    config, opts, about_labels = _recipe(files)
    written = [(split, file) for split, file in zip(splits, files) if split.json_file is None]
    check_outputs([file.json_file for _, file in written], [source])
    for split, file in written:
        with output_file(file.json_file, "w") as f:
            json.dump({"info": {"notes": split.notes}, **split.coco}, f)
    notes = [line for split in splits for line in split.lines()]
    image_dirs = [split.image_dir for split in splits]
    return Conversion(list(zip(files, image_dirs)), notes + about_labels, config, opts)


def _splits(source: Path) -> list[Split]:
    if source.suffix == ".json" and source.is_file():
        images = source.parent / "images"
        folder = images if images.is_dir() else source.parent
        return [Split("train", read_json("train", str(source)), folder, source)]
    if source.is_file():
        return splits_of(Yolo(source))
    if ready := sorted(source.glob(f"*/{_ROBOFLOW}")):
        names = ["val" if file.parent.name == "valid" else file.parent.name for file in ready]
        named = zip(names, ready)
        return [Split(name, read_json(name, str(f)), f.parent, f) for name, f in named]
    dataset = Yolo(source / "data.yaml") if (source / "data.yaml").exists() else PascalVoc(source)
    if not source.is_dir() or not dataset.splits:
        raise ConfigError(
            f"--input {source} has neither a data.yaml with splits (YOLO) nor .xml files (Pascal "
            f"VOC) nor folders with {_ROBOFLOW} (Roboflow). For a COCO file, name the file"
        )
    return splits_of(dataset)


def _checked(split: Split, output: Path, image_dir: Optional[Path]) -> CocoFile:
    """Check a split as training does. Without a folder, its images are not checked."""
    file = str(split.json_file or output / f"{split.name}.json")
    folder = str(image_dir) if image_dir else None
    checked = check_coco(split.name, file, split.coco, folder, split.name == "train")
    check_crowd(checked.summary)
    return checked


def _recipe(files: Sequence[CocoFile]) -> tuple[str, list[str], list[str]]:
    """A recipe that learns the labels, its KEY VALUE pairs, and lines about the labels.

    Raises:
        DataError: not even boxes can be learnt.
    """
    has_codes = any(file.summary.case("rle") for file in files)
    opts = ["INPUT.MASK_FORMAT", "bitmask"] if has_codes else []
    notes = []
    for config in [_MASKS, _BOXES] if any(file.has_masks for file in files) else [_BOXES]:
        cfg = get_cfg()
        cfg.merge_from_file(str(detectron2_zoo() / f"{config}.yaml"))
        cfg.merge_from_list(opts)
        try:
            fit_to_data(cfg, files[:1], files[1:], ())
            break
        except DataError as e:
            if config == _BOXES:
                raise
            notes.append(f"Only boxes can be learnt: {e}")
    for file in files:
        about_boxes = complaints_about_boxes(file.summary.cases, file.summary.num_objects)
        about_labels = complaints_about_labels(cfg, file.summary)
        notes += [f"{file.name}: {text}" for _, text in [*about_boxes, *about_labels]]
    return config, opts if config == _MASKS else [], notes
