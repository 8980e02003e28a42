# Copyright (c) the d2_memfit developers.
"""Datasets with a label file for each image, of YOLO and Pascal VOC, as splits in COCO's format."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional, Union
from xml.etree import ElementTree

from pycocotools import mask as coco_masks

from ..common.reading import checked, load_yaml
from ..errors import DataError
from .annotations import faults_of
from .images import read_header

__all__ = ["PascalVoc", "Split", "Yolo", "splits_of"]

_IMAGES = (".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_SPLITS = {"train": "train", "val": "val", "valid": "val", "test": "test"}
_VOC = (("JPEGImages", "Annotations"), ("images", "annotations"), ("", ""))
# Faults of objects that cannot be learnt.
_USELESS = {"bad_polygon", "odd_polygon", "thin_mask"}
_USELESS |= {"empty_box", "huge_box", "nan_box", "negative_box", "no_box"}
_Splits = dict[str, dict[Path, Path]]  # label files by image and by name of split
_Rows = list[tuple[str, Any]]  # objects as they are written, with their places


@dataclass
class Split:
    """A split of a dataset, as a COCO file.

    Attributes:
        name: "train", "val", "test", or another.
        coco: the content of the file.
        image_dir: the folder of its images.
        json_file: the file, if there is one already.
        notes: what a user should know about the split, with places in the dataset.
    """

    name: str
    coco: dict[str, Any]
    image_dir: Path
    json_file: Optional[Path] = None
    notes: dict[str, list[str]] = field(default_factory=dict)

    def note(self, text: str, *places: Any) -> None:
        if places:
            self.notes.setdefault(text, []).extend(map(str, places))

    def lines(self) -> list[str]:
        """The notes, each with the number of places and the first three."""
        notes = self.notes.items()
        return [f"{self.name}: {len(at)} {text}: {'; '.join(at[:3])}" for text, at in notes]


class Yolo:
    """A dataset with a YAML file: ``names``, ``train``, and perhaps ``path``, ``val``, ``test``.

    A split is a folder of images, a text file with their paths, or a list of these. Labels are in
    folders ``labels`` where images are in ``images``. Each line has a class, and a box or the
    corners of a polygon, as fractions of the image.
    """

    def __init__(self, file: Path) -> None:
        self.splits: _Splits = {}
        try:
            data = load_yaml(file)
            names = data["names"]
            names = enumerate(names) if isinstance(names, list) else names.items()
            self.names = {int(number): str(name) for number, name in names}
            if data.get("kpt_shape"):
                raise ValueError("it has kpt_shape, but keypoints of YOLO are not converted")
            for key, split in _SPLITS.items():
                places = data.get(key) or []
                for place in places if isinstance(places, list) else [places]:
                    images = _images_at(file.parent, str(data.get("path") or ""), str(place))
                    self.splits.setdefault(split, {}).update(zip(images, map(_yolo_label, images)))
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise DataError(f"{file} cannot be read ({type(e).__name__}: {e})") from e

    def rows(self, file: Path) -> _Rows:
        lines = enumerate(_lines(file), 1)
        return [(f"{file}, line {number}", line.split()) for number, line in lines if line.strip()]

    def annotation(self, row: list[str], size: tuple[int, int]) -> dict[str, Any]:
        number, *values = map(float, row)
        if number not in self.names:
            raise ValueError(f"names has no class {row[0]}")
        if len(values) != 4 and (len(values) < 6 or len(values) % 2):
            raise ValueError(f"{len(row)} numbers: a box has 5, a polygon 7, 9, 11 or more")
        pixels = [round(value * size[i % 2], 3) for i, value in enumerate(values)]
        if len(pixels) > 4:
            return {"category_id": self.names[int(number)], "segmentation": [pixels]}
        x, y, w, h = pixels
        return {"category_id": self.names[int(number)], "bbox": [x - w / 2, y - h / 2, w, h]}


def _images_at(folder: Path, root: str, name: str) -> list[Path]:
    """The images of a split that a YAML file in this folder names."""
    # Roboflow writes ../train/images for a folder next to data.yaml.
    for path in (folder / root / name, folder / name, folder / name.removeprefix("../")):
        place = Path(os.path.normpath(path))
        if place.is_dir() and place not in folder.parents:
            return _find_images(place)
        if place.is_file():
            lines = filter(None, map(str.strip, _lines(place)))
            return [Path(os.path.normpath(place.parent / line)) for line in lines]
    raise ValueError(f"there is no folder or list of images {name}")


def _yolo_label(image: Path) -> Path:
    before, images, after = str(image).rpartition("/images/")
    return Path(f"{before}/labels/{after}" if images else image).with_suffix(".txt")


class PascalVoc:
    """A dataset with an XML file for each image.

    ``train.txt``, ``val.txt``, ``trainval.txt`` and ``test.txt`` in ``ImageSets/Main`` name the
    images of splits. Without them, the folders ``train``, ``val`` or ``valid``, and ``test`` are
    splits, or all images are one.
    """

    def __init__(self, folder: Path) -> None:
        self.names: dict[int, str] = {}  # classes are those of the objects
        self.splits: _Splits = {}
        for name, split in _SPLITS.items():
            if labels := _voc_labels(folder / name):
                self.splits.setdefault(split, {}).update(labels)
        if not self.splits and (labels := _voc_labels(folder)):
            self.splits = _listed(folder, labels) or {"train": labels}

    def rows(self, file: Path) -> _Rows:
        root = ElementTree.parse(checked(file)).getroot()
        if root.tag != "annotation":
            raise ValueError(f"it has <{root.tag}> in place of <annotation>")
        return [(f"{file}, object {n}", row) for n, row in enumerate(root.findall("object"), 1)]

    def annotation(self, row: ElementTree.Element, size: tuple[int, int]) -> dict[str, Any]:
        # Pixels are counted from 1, and the last one belongs to the box.
        corners = ("xmin", "xmax", "ymin", "ymax")
        numbers = [float(row.findtext(f"bndbox/{corner}", "")) - 1 for corner in corners]
        (x0, x1), (y0, y1) = sorted(numbers[:2]), sorted(numbers[2:])
        polygons = [
            [float(value.text or "") - 1 for value in polygon.iter() if not len(value)]
            for polygon in row.findall("polygon")
        ]
        return {
            "category_id": row.findtext("name", "").strip(),
            "bbox": [x0, y0, x1 + 1 - x0, y1 + 1 - y0],
            "difficult": row.findtext("difficult", "").strip() == "1",
            **({"segmentation": polygons} if polygons else {}),
        }


def _voc_labels(folder: Path) -> dict[Path, Path]:
    """XML files by image, in the folders of a split."""
    for images, annotations in ((folder / one, folder / other) for one, other in _VOC):
        if images.is_dir() and any(annotations.rglob("*.xml")):
            found = _find_images(images)
            return {f: (annotations / f.relative_to(images)).with_suffix(".xml") for f in found}
    return {}


def _listed(folder: Path, labels: dict[Path, Path]) -> _Splits:
    """The splits that lists name; an image that is not there is a path without a file."""
    named = {image.stem: (image, label) for image, label in labels.items()}
    splits: _Splits = {}
    for name in ("train", "val", "test", "trainval"):
        file = folder / "ImageSets" / "Main" / f"{name}.txt"
        if file.is_file():
            ids = filter(None, map(str.strip, _lines(file)))
            missing = folder / "JPEGImages", folder / "Annotations"
            splits[name] = dict(named.get(i, (missing[0] / i, missing[1] / i)) for i in ids)
    others = {*splits.get("train", ()), *splits.get("val", ())}
    both = splits.pop("trainval", {})
    if rest := {image: label for image, label in both.items() if image not in others}:
        splits.setdefault("val" if "train" in splits else "train", rest)
    return splits


def splits_of(dataset: Union[Yolo, PascalVoc]) -> list[Split]:
    """The splits of a dataset, with notes on all that is left out.

    Raises:
        DataError: more is left out than is kept.
    """
    splits = [_split(name, labels, dataset) for name, labels in dataset.splits.items()]
    annotations = [annotation for split in splits for annotation in split.coco["annotations"]]
    names = dataset.names.values() or sorted({a["category_id"] for a in annotations})
    ids = {name: number for number, name in enumerate(names, 1)}
    for annotation in annotations:
        annotation["category_id"] = ids[annotation["category_id"]]
    used: set[Path] = set()
    for split, labels in zip(splits, dataset.splits.values()):
        split.coco["categories"] = [{"id": number, "name": name} for name, number in ids.items()]
        used.update(labels, labels.values())
    there = {f for folder in {f.parent for f in used} for f in folder.glob("*")}
    kinds = {file.suffix for file in used}
    for split in splits[:1]:
        left = sorted(f for f in there - used if f.suffix in kinds and f.name != "classes.txt")
        split.note("files are in no split and are left out", *left)
    return splits


def _split(name: str, labels: dict[Path, Path], dataset: Union[Yolo, PascalVoc]) -> Split:
    if not labels:
        raise DataError(f"the split {name} of the dataset has no images")
    folder = Path(os.path.commonpath([image.parent for image in labels]))
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    split = Split(name, {"images": images, "annotations": annotations}, folder)
    for file, label in labels.items():
        try:
            size, *_ = read_header(str(file))
            rows = dataset.rows(label) if label.exists() else []
        except Exception as e:  # PIL, XML and text have many errors
            text = "images or their labels cannot be read and are left out"
            split.note(text, f"{file} and {label.name} ({e})")
            continue
        if not label.exists():
            split.note("images have no label file, so they have no objects", file)
        image = {"id": len(images) + 1, "file_name": str(file.relative_to(folder))}
        images.append({**image, "width": size[0], "height": size[1]})
        for where, row in rows:
            try:
                annotation = _whole(dataset.annotation(row, size), size)
            except ValueError as e:
                split.note("objects cannot be learnt and are left out", f"{where} ({e})")
                continue
            numbers = {"id": len(annotations) + 1, "image_id": len(images), "iscrowd": 0}
            annotations.append({**numbers, **annotation})
            if annotation.get("difficult"):
                split.note("objects are difficult, and kept as in Detectron2's Pascal VOC", where)
    corners = {len(p) for a in annotations for p in a.get("segmentation", ())}
    if corners == {8}:
        text = "images have only masks of four corners, like oriented boxes. Boxes are axis-aligned"
        split.note(text, *(image["file_name"] for image in images))
    for (text, places), complaint in zip(split.notes.items(), split.lines()):
        kept = annotations if text.startswith("objects") else images
        if text.endswith("left out") and len(places) > len(kept):
            raise DataError(complaint)
    return split


def _whole(annotation: dict[str, Any], size: tuple[int, int]) -> dict[str, Any]:
    """An annotation with its box and area, in pixels.

    Raises:
        ValueError: nothing can be learnt from it.
    """
    width, height = size
    polygons = annotation.get("segmentation", ())
    xs, ys = ([n for polygon in polygons for n in polygon[axis::2]] for axis in (0, 1))
    if polygons:
        around = [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
        annotation = {"bbox": around, **annotation}
    if useless := sorted(_USELESS.intersection(faults_of(annotation, (height, width)))):
        raise ValueError(f"fault: {', '.join(useless).replace('_', ' ')}")
    x, y, w, h = annotation["bbox"]
    if x >= width or y >= height or x + w <= 0 or y + h <= 0:
        raise ValueError("it lies outside its image")
    codes = coco_masks.frPyObjects(polygons, height, width) if polygons else []
    area = float(coco_masks.area(coco_masks.merge(codes))) if polygons else w * h
    if not area:
        raise ValueError("it has no area")
    if annotation["category_id"] == "":
        raise ValueError("it has no name")
    return {**annotation, "bbox": [round(n, 3) for n in (x, y, w, h)], "area": round(area, 3)}


def _find_images(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.suffix.lower() in _IMAGES)


def _lines(file: Path) -> list[str]:
    """The lines of a text file that a user has written."""
    try:
        return Path(checked(file)).read_text("utf-8-sig").splitlines()  # editors write a BOM
    except ValueError as e:
        raise DataError(f"{file} cannot be read ({e})") from e
