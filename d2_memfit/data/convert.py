# Copyright (c) the d2_memfit developers.
"""Folders of YOLO, Pascal VOC and Roboflow, made into files in COCO's format by supervision."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from ..common.files import check_outputs, output_file
from ..errors import ConfigError, DataError

__all__ = ["ConvertedSplit", "convert_folder"]

_ROBOFLOW = "_annotations.coco.json"
_SPLITS = {"train": "train", "val": "val", "valid": "val", "test": "test"}


@dataclass(frozen=True)
class ConvertedSplit:
    """One part of a dataset: its name, its file in COCO's format, and the folder of its images."""

    name: str
    json_file: Path
    image_dir: Path


def convert_folder(folder: Path, output: Path) -> list[ConvertedSplit]:
    """Write the parts of a dataset as ``output/train.json``, ``val.json`` and ``test.json``.

    Args:
        folder: it has a ``data.yaml`` (YOLO), ``.xml`` files beside images or in ``Annotations``
            (Pascal VOC), or Roboflow's ``_annotations.coco.json``, which need no conversion.
        output: is made if necessary. Images stay where they are.

    Raises:
        ConfigError: there is no such folder, it has another layout, or supervision is missing.
        DataError: a file in it cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError(f"--input {folder}: there is no such folder")
    ready = [
        ConvertedSplit(_SPLITS.get(file.parent.name, file.parent.name), file, file.parent)
        for file in sorted(folder.glob(f"*/{_ROBOFLOW}"))
    ]
    if ready:
        return ready
    parts = list(_yolo(folder) if (folder / "data.yaml").is_file() else _pascal_voc(folder))
    if not parts:
        raise ConfigError(
            f"--input {folder} has neither a data.yaml (YOLO) nor .xml files (Pascal VOC) nor "
            f"{_ROBOFLOW} (Roboflow)"
        )
    check_outputs([output / f"{name}.json" for name, *_ in parts])
    converted = []
    for name, images, load in parts:
        file = output / f"{name}.json"
        try:
            dataset = load()
            with output_file(file) as written:
                dataset.as_coco(annotations_path=written.name)
        except ConfigError:
            raise
        except Exception as e:  # as various as the files
            raise DataError(f"{images} cannot be converted ({type(e).__name__}: {e})") from e
        converted.append(ConvertedSplit(name, file, images))
    return converted


def _load(layout: str, *places: Path) -> Any:
    """Supervision's dataset of a folder: a class method of ``DetectionDataset``, and its paths."""
    try:
        from supervision import DetectionDataset
    except ImportError as e:
        raise ConfigError(
            f"folders are converted by supervision ({e}): pip install supervision"
        ) from e
    return getattr(DetectionDataset, layout)(*map(str, places))


def _yolo(folder: Path) -> Iterator[tuple[str, Path, Any]]:
    """The parts that ``data.yaml`` names. Labels are in a folder ``labels`` like ``images``."""
    file = folder / "data.yaml"
    try:
        data = dict(yaml.safe_load(file.read_text()))
    except (OSError, TypeError, ValueError, yaml.YAMLError) as e:
        raise DataError(f"{file} cannot be read ({type(e).__name__}: {e})") from e
    root = folder / str(data.get("path") or "")
    for key in (key for key in ("train", "val", "test") if isinstance(data.get(key), str)):
        # Roboflow writes ../train/images for a folder beside data.yaml.
        places = [root / data[key], folder / data[key], folder / data[key].removeprefix("../")]
        images = next((place.resolve() for place in places if place.is_dir()), None)
        if images is None:
            raise DataError(f"{file}: {key}: there is no folder {data[key]}")
        *before, _, after = f"/{images}/".rpartition("/images/")
        labels = Path("".join(before)) / "labels" / after.strip("/")

        yield key, images, partial(_load, "from_yolo", images, labels, file)


def _pascal_voc(folder: Path) -> Iterator[tuple[str, Path, Any]]:
    """Folders with ``.xml`` files: ``train``, ``valid`` and ``test``, or one for all images."""
    places = [(_SPLITS[name], folder / name, folder / name) for name in _SPLITS]
    places += [("train", folder / "JPEGImages", folder / "Annotations"), ("train", folder, folder)]
    for name, images, annotations in places:
        if images.is_dir() and any(annotations.glob("*.xml")):
            yield name, images, partial(_load, "from_pascal_voc", images, annotations)
