# Copyright (c) the d2_memfit developers.
"""Folders of YOLO and Pascal VOC, whose splits have the objects that were written, no others."""

import json
import os

import cv2
import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_masks
from small_datasets import (
    SIZE,
    SQUARE,
    box_row,
    polygon_xml,
    row_of,
    save_image,
    write_voc,
    write_yolo,
    xml_of,
)

from d2_memfit.data.label_files import PascalVoc, Yolo, splits_of
from d2_memfit.errors import DataError


def yolo_splits(folder, file="data.yaml"):
    return {split.name: split for split in splits_of(Yolo(folder / file))}


def voc_splits(folder):
    return {split.name: split for split in splits_of(PascalVoc(folder))}


def names_in(splits):
    return {name: [i["file_name"] for i in split.coco["images"]] for name, split in splits.items()}


def boxes_in(split):
    return [annotation["bbox"] for annotation in split.coco["annotations"]]


# A shape and the areas that add to or take from it, as polygons.
HOLE = [[10, 10], [34, 10], [34, 34], [10, 34], [10, 10], [16, 16], [16, 28], [28, 28], [28, 16]]
SHAPES = {
    "square": [SQUARE],
    "with a hole": [[*HOLE, [16, 16]]],
    "of three parts": [SQUARE, [[30, 8], [40, 8], [40, 18]], [[30, 30], [44, 30], [44, 44]]],
    "two parts by a seam": [[*SQUARE, [8, 8], [40, 30], [52, 30], [52, 40], [40, 30]]],
    "a thin diagonal": [[[2, 2], [60, 44], [60.4, 43.6], [2.4, 1.6]]],
    "a bow": [[[8, 8], [40, 40], [40, 8], [8, 40]]],
    "a star": [[[20, 2], [28, 40], [4, 14], [36, 14], [12, 40]]],
    "over the edge": [[[50, 30], [70, 30], [70, 52], [50, 52]]],
}


def drawn(polygons):
    """How much of each pixel is in an odd number of rings of a polygon; drawn by OpenCV."""
    scale = 16
    width, height = SIZE
    total = np.zeros((height * scale, width * scale), np.uint8)
    for polygon in polygons:
        one = np.zeros_like(total)
        cv2.fillPoly(one, [np.round(np.array(polygon) * scale).astype(np.int32)], 1)
        total |= one
    return total.reshape(height, scale, width, scale).mean((1, 3))


@pytest.mark.parametrize("write", ["yolo", "voc"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_an_object_with_its_mask(tmp_path, shape, write):
    polygons = SHAPES[shape]
    if write == "yolo":
        write_yolo(tmp_path, [row_of(polygon) for polygon in polygons])
        splits = yolo_splits(tmp_path)
    else:
        around = [f(n[i] for p in polygons for n in p) for f in (min, max) for i in (0, 1)]
        box = [around[0] + 1, around[1] + 1, *around[2:]]
        more = "".join(polygon_xml(*polygon) for polygon in polygons)
        write_voc(tmp_path, objects=[("coin", box, more)])
        splits = voc_splits(tmp_path)
    annotations = [a for a in splits["train"].coco["annotations"] if a["image_id"] == 1]
    assert len(annotations) == (len(polygons) if write == "yolo" else 1)
    assert {a["iscrowd"] for a in annotations} == {0}
    masks = [coco_masks.frPyObjects(a["segmentation"], *SIZE[::-1]) for a in annotations]
    found = np.max([coco_masks.decode(coco_masks.merge(codes)) for codes in masks], axis=0)
    expected = drawn(polygons)
    if shape == "a thin diagonal":  # of half a pixel
        assert found.sum() >= 20
        assert (expected[found > 0] > 0).mean() > 0.9
    else:
        assert np.abs(found - expected).sum() < 0.12 * expected.sum() + 10
    assert sum(a["area"] for a in annotations) == pytest.approx(found.sum(), abs=2)
    box = np.array([a["bbox"] for a in annotations])
    corners = np.array([n for polygon in polygons for n in polygon])
    assert box[:, :2].min(0) == pytest.approx(corners.min(0), abs=0.01)
    assert (box[:, :2] + box[:, 2:]).max(0) == pytest.approx(corners.max(0), abs=0.01)


YOLO = {
    "Roboflow": ({}, "{split}/{kind}"),
    "Ultralytics": ({"train": "images/train", "val": "images/val"}, "{kind}/{split}"),
    "with dots": ({"train": "../train/images", "val": "../val/images"}, "{split}/{kind}"),
    "with a path": (
        {"path": "data", "train": "images/train", "val": "images/val"},
        "data/{kind}/{split}",
    ),
    "lists of folders": (
        {"train": ["train/images", "more/images"], "val": ["val/images"]},
        "{split}/{kind}",
    ),
    "subfolders": ({"train": "images/train", "val": "images/val"}, "{kind}/{split}/2024/may"),
    "lists of files": ({"train": "train.txt", "val": "lists/val.txt"}, "{kind}/{split}"),
    "an absolute path": (
        {"path": "{folder}/data", "train": "images/train", "val": "images/val"},
        "data/{kind}/{split}",
    ),
    "absolute folders": (
        {"train": "{folder}/far/train/images", "val": "{folder}/far/val/images"},
        "far/{split}/{kind}",
    ),
    "the name valid": ({"val": None, "valid": "val/images"}, "{split}/{kind}"),
    "images named twice in a path": (
        {"train": "images/images/train", "val": "images/images/val"},
        "images/{kind}/{split}",
    ),
    "images beside labels": ({"train": "train", "val": "val"}, "{split}"),
}


@pytest.mark.parametrize("layout", YOLO)
def test_layouts_of_yolo(tmp_path, layout):
    entries, places = YOLO[layout]
    text = json.dumps({"train": "train/images", "val": "val/images", "names": ["coin"], **entries})
    (tmp_path / "data.yaml").write_text(text.replace("{folder}", str(tmp_path)))
    for number, split in enumerate(("train", "val", "more")):
        folder = tmp_path / places.format(split=split, kind="labels")
        save_image(tmp_path / places.format(split=split, kind="images") / f"{split} a.b.JPG")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{split} a.b.txt").write_text(box_row(number, 2, 8, 9) + "\n")
    (tmp_path / "train.txt").write_text("./images/train/train a.b.JPG\r\n\n")
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "val.txt").write_text(f"{tmp_path}/images/val/val a.b.JPG\n")
    splits = yolo_splits(tmp_path)
    boxes = [[0, 2, 8, 9], [2, 2, 8, 9]] if layout == "lists of folders" else [[0, 2, 8, 9]]
    assert boxes_in(splits["train"]) == boxes
    assert boxes_in(splits["val"]) == [[1, 2, 8, 9]]
    for split in splits.values():
        assert not split.notes
        for image in split.coco["images"]:
            assert (split.image_dir / image["file_name"]).is_file()
            assert (image["width"], image["height"]) == SIZE


ROWS = {
    "carriage returns": f"{box_row(2, 3, 8, 9)}\r\n",
    "tabs and spaces": box_row(2, 3, 8, 9).replace(" ", "\t  ") + " \n \n",
    "numbers of NumPy": "0.000e+00 " + box_row(2, 3, 8, 9).partition(" ")[2],
    "a byte order mark": "\ufeff" + box_row(2, 3, 8, 9),
}


@pytest.mark.parametrize("text", ROWS)
@pytest.mark.parametrize("names", [["coin", "ring"], {0: "coin", 5: "ring"}, {"0": "coin", "5": 7}])
def test_rows_and_names_of_yolo(tmp_path, text, names):
    write_yolo(tmp_path, names=names)
    (tmp_path / "train" / "labels" / "train.txt").write_text(ROWS[text], encoding="utf-8")
    split = yolo_splits(tmp_path)["train"]
    assert boxes_in(split) == [[2, 3, 8, 9]]
    second = "7" if isinstance(names, dict) and "0" in names else "ring"
    assert split.coco["categories"] == [{"id": 1, "name": "coin"}, {"id": 2, "name": second}]


def test_photographs_on_their_side_are_turned_as_detectron2_turns_them(tmp_path):
    write_yolo(tmp_path, [box_row(2, 3, 8, 9, size=SIZE[::-1])])
    exif = Image.Exif()
    exif[0x0112] = 6
    save_image(tmp_path / "train" / "images" / "train.jpg", exif=exif)
    split = yolo_splits(tmp_path)["train"]
    (image,) = split.coco["images"]
    assert (image["width"], image["height"]) == SIZE[::-1]
    assert boxes_in(split) == [[2, 3, 8, 9]]


BAD_ROWS = {
    "0 a b c d": "could not convert string to float: 'a'",
    "0 nan 0.5 0.1 0.1": "fault: nan box",
    "0 0.5 inf 0.1 0.1": "fault: nan box",
    "0 0.5 0.5 1e9 0.1": "fault: huge box",
    "0 0.5 0.5 -0.1 0.1": "fault: negative box",
    "0 0.5 0.5 0 0.1": "fault: empty box",
    "0 1.5 0.5 0.1 0.1": "it lies outside its image",
    "0 0.5 -0.5 0.1 0.1": "it lies outside its image",
    "0 -0.5 0.5 0.1 0.1": "it lies outside its image",
    "0 0.5 1.5 0.1 0.1": "it lies outside its image",
    "2 0.5 0.5 0.1 0.1": "names has no class 2",
    "-1 0.5 0.5 0.1 0.1": "names has no class -1",
    "0.5 0.5 0.5 0.1 0.1": "names has no class 0.5",
    "nan 0.5 0.5 0.1 0.1": "names has no class nan",
    "coin 0.5 0.5 0.1 0.1": "could not convert string to float: 'coin'",
    "0": "1 numbers: a box has 5, a polygon 7, 9, 11 or more",
    "0 0.5 0.5 0.1": "4 numbers: a box has 5, a polygon 7, 9, 11 or more",
    "0 0.5 0.5 0.1 0.1 0.9": "6 numbers: a box has 5, a polygon 7, 9, 11 or more",
    "0 0.1 0.1 0.5 0.1 0.5 0.5 0.9": "8 numbers: a box has 5, a polygon 7, 9, 11 or more",
    "0 0.1 0.1 0.5 0.1 0.9 0.1": "fault: empty box",
    "0 0.1 0.1 nan 0.1 0.9 0.5": "fault: bad polygon",
    "0 0.1 0.1 1e12 0.1 0.9 0.5": "fault: bad polygon, huge box",
    "0 0.5 0.5 0.5 0.5 0.5 0.5": "fault: empty box",
    "0 2.1 0.1 2.5 0.1 2.5 0.5": "it lies outside its image",
    "0,0.5,0.5,0.1,0.1": "could not convert string to float: '0,0.5,0.5,0.1,0.1'",
}


def test_each_row_that_cannot_be_kept_is_named_with_its_file_and_line(tmp_path):
    good = [box_row(8, 8, 16, 16, 1)] * (len(BAD_ROWS) + 1)
    write_yolo(tmp_path, [*BAD_ROWS, *good], splits=["train"])
    split = yolo_splits(tmp_path)["train"]
    assert boxes_in(split) == [[8, 8, 16, 16]] * len(good)
    ((text, places),) = split.notes.items()
    assert text == "objects cannot be learnt and are left out"
    file = tmp_path / "train" / "labels" / "train.txt"
    expected = [f"{file}, line {n} ({why})" for n, why in enumerate(BAD_ROWS.values(), 1)]
    assert places == expected
    (line,) = split.lines()
    assert line == f"train: {len(BAD_ROWS)} {text}: {'; '.join(expected[:3])}"


@pytest.mark.parametrize("row", BAD_ROWS)
def test_it_is_an_error_if_more_is_left_out_than_is_kept(tmp_path, row):
    write_yolo(tmp_path, [row, row, box_row(8, 8, 16, 16)])
    with pytest.raises(DataError, match=r"^train: 2 objects .* left out: .*train\.txt, line 1 \("):
        yolo_splits(tmp_path)


BAD_OBJECTS = {
    "it has no name": ("", (9, 9, 24, 24), ""),
    "fault: nan box": ("coin", ("nan", 9, 24, 24), ""),
    "could not convert string to float: 'x'": ("coin", ("x", 9, 24, 24), ""),
    "could not convert string to float: ''": ("coin", ("", 9, 24, 24), ""),
    "it lies outside its image": ("coin", (90, 9, 99, 24), ""),
    "fault: thin mask": ("coin", (9, 9, 24, 24), polygon_xml([9, 9], [20, 20])),
    "it has no area": ("coin", (9, 9, 24, 24), polygon_xml([9, 9], [20, 9], [15, 9])),
    "fault: odd polygon": ("coin", (9, 9, 24, 24), "<polygon>" + "<x>9</x>" * 7 + "</polygon>"),
}


def test_each_object_of_voc_that_cannot_be_kept_is_named(tmp_path):
    good = [("coin", (9, 9, 24, 24), "")] * len(BAD_OBJECTS)
    write_voc(tmp_path, number=1)
    file = tmp_path / "Annotations" / "0.xml"
    file.write_text(xml_of([*good, *BAD_OBJECTS.values()]))
    split = voc_splits(tmp_path)["train"]
    assert boxes_in(split) == [[8, 8, 16, 16]] * len(good)
    (places,) = split.notes.values()
    reasons = enumerate(BAD_OBJECTS, len(good) + 1)
    assert places == [f"{file}, object {number} ({why})" for number, why in reasons]


def test_corners_in_another_order_are_the_same_box_and_difficult_objects_are_kept(tmp_path):
    objects = [
        ("coin", (24, 9, 9, 24), "<difficult>1</difficult>"),
        ("ring", (9, 24, 24, 9), "<difficult> 0</difficult><truncated>1</truncated>"),
    ]
    split = voc_splits(write_voc(tmp_path, number=1, objects=objects))["train"]
    assert boxes_in(split) == [[8, 8, 16, 16]] * 2
    assert [a["category_id"] for a in split.coco["annotations"]] == [1, 2]
    (line,) = split.lines()
    assert line.startswith("train: 1 objects are difficult, and kept as in Detectron2's Pascal VOC")


IMAGES = {
    "gone": (lambda file: file.unlink(), "No such file or directory"),
    "text": (lambda file: file.write_text("no image"), "cannot identify image file"),
    "truncated": (lambda file: file.write_bytes(file.read_bytes()[:-300]), "image file is trunc"),
    "a pipe": (lambda file: [file.unlink(), os.mkfifo(file)], "it is a pipe"),
    "a folder": (lambda file: [file.unlink(), file.mkdir()], "it is a folder"),
}


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("write", [write_yolo, write_voc])
def test_an_image_that_cannot_be_read_is_left_out_and_named(tmp_path, write, image):
    spoil, why = IMAGES[image]
    if write is write_yolo:
        write(tmp_path, train="list.txt")
        files = [tmp_path / "train" / "images" / f"{i}.jpg" for i in range(3)]
        for file in files:
            save_image(file)
            (tmp_path / "train" / "labels" / f"{file.stem}.txt").write_text(box_row(8, 8, 16, 16))
        (tmp_path / "list.txt").write_text("\n".join(map(str, files)))
    else:
        write(tmp_path, {"train": range(3), "val": [3]})
        files = [tmp_path / "JPEGImages" / f"{i}.jpg" for i in range(3)]
    spoil(files[1])
    split = (yolo_splits if write is write_yolo else voc_splits)(tmp_path)["train"]
    assert [i["file_name"] for i in split.coco["images"]] == ["0.jpg", "2.jpg"]
    assert {a["image_id"] for a in split.coco["annotations"]} == {1, 2}
    (place,) = split.notes["images or their labels cannot be read and are left out"]
    assert str(files[1]) in place or image == "gone"
    assert why in place


LABELS = {
    "binary": (b"\xff\xfe\x00\x81", "1.jpg and 1.xml ("),
    "cut off": (b"<annotation><object>", "no element found"),
    "empty": (b"", "no element found"),
    "HTML": (b"<html></html>", "it has <html> in place of <annotation>"),
    "entities without end": (
        b'<!DOCTYPE a [<!ENTITY b "'
        + b"ha" * 100
        + b'">'
        + b"".join(
            b'<!ENTITY %c "%s">' % (c + 1, b"&%c;" % c * 100) for c in range(ord("b"), ord("h"))
        )
        + b"]><annotation>&h;</annotation>",
        "limit on input amplification factor",
    ),
    "another file's content": (
        b'<!DOCTYPE a [<!ENTITY b SYSTEM "file:///etc/passwd">]><annotation>&b;</annotation>',
        "undefined entity",
    ),
}


@pytest.mark.parametrize("label", LABELS)
def test_a_label_file_that_cannot_be_read_leaves_its_image_out(tmp_path, label):
    content, why = LABELS[label]
    write_voc(tmp_path, number=3)
    (tmp_path / "Annotations" / "1.xml").write_bytes(content)
    split = voc_splits(tmp_path)["train"]
    assert [image["file_name"] for image in split.coco["images"]] == ["0.jpg", "2.jpg"]
    (place,) = split.notes["images or their labels cannot be read and are left out"]
    assert why in place


# Lists, images of splits, and what is said.
LISTS = {
    "all four": (
        {"train": [0], "val": [1], "trainval": [0, 1], "test": [2]},
        {"train": [0], "val": [1], "test": [2]},
        "files are in no split and are left out: {folder}/Annotations/3.xml; {folder}/JPEGImages/3",
    ),
    "trainval alone": ({"trainval": [0, 1], "test": [2, 3]}, {"train": [0, 1], "test": [2, 3]}, ""),
    "trainval and train": (
        {"trainval": [0, 1, 2, 3], "train": [0, 3]},
        {"train": [0, 3], "val": [1, 2]},
        "",
    ),
    "trainval and val": (
        {"trainval": [0, 1, 2, 3], "val": [0]},
        {"train": [1, 2, 3], "val": [0]},
        "",
    ),
    "of a class": (
        {"coin_train": ["0  1", "1 -1"], "coin_val": ["2  1"]},
        {"train": [0, 1, 2, 3]},
        "",
    ),
    "an id without an image": (
        {"train": [0, 1, 2, "no"], "val": [3]},
        {"train": [0, 1, 2], "val": [3]},
        "are left out: {folder}/JPEGImages/no and no ({folder}/JPEGImages/no cannot",
    ),
}


@pytest.mark.parametrize("lists", LISTS)
def test_lists_of_voc_decide_the_parts(tmp_path, lists):
    written, expected, said = LISTS[lists]
    splits = voc_splits(write_voc(tmp_path, written))
    assert names_in(splits) == {k: [f"{i}.jpg" for i in ids] for k, ids in expected.items()}
    lines = [line for split in splits.values() for line in split.lines()]
    assert len(lines) == bool(said)
    assert said.format(folder=tmp_path) in "".join(lines)


@pytest.mark.parametrize("layout", ["", "images", "JPEGImages"])
def test_folders_of_voc(tmp_path, layout):
    other = {"": "", "images": "annotations", "JPEGImages": "Annotations"}[layout]
    for split in ("train", "valid", "test"):
        save_image(tmp_path / split / layout / "may" / "a.png")
        labels = tmp_path / split / other / "may"
        labels.mkdir(parents=True, exist_ok=True)
        (labels / "a.xml").write_text(xml_of([(split, (9, 9, 24, 24), "")]))
    splits = voc_splits(tmp_path)
    assert names_in(splits) == {"train": ["a.png"], "val": ["a.png"], "test": ["a.png"]}
    categories = [split.coco["categories"] for split in splits.values()]
    names = ["test", "train", "valid"]
    assert categories == [[{"id": i + 1, "name": n} for i, n in enumerate(names)]] * 3
    assert [p.coco["annotations"][0]["category_id"] for p in splits.values()] == [2, 3, 1]


def test_labels_without_images_and_images_without_labels_are_named(tmp_path):
    write_yolo(tmp_path)
    save_image(tmp_path / "train" / "images" / "b.jpg")
    for name in ("c", "classes"):
        (tmp_path / "train" / "labels" / f"{name}.txt").write_text(box_row(2, 2, 9, 9))
    assert yolo_splits(tmp_path)["train"].lines() == [
        "train: 1 images have no label file, so they have no objects: "
        f"{tmp_path}/train/images/b.jpg",
        f"train: 1 files are in no split and are left out: {tmp_path}/train/labels/c.txt",
    ]


def test_oriented_boxes_are_polygons_and_it_is_said(tmp_path):
    oriented = [[10, 4], [40, 20], [34, 30], [4, 14]]
    write_yolo(tmp_path, [row_of(oriented)] * 2)
    split = yolo_splits(tmp_path)["train"]
    for annotation in split.coco["annotations"]:
        assert annotation["bbox"] == pytest.approx([4, 4, 36, 26])
        assert annotation["segmentation"][0] == pytest.approx([n for xy in oriented for n in xy])
    assert split.lines() == [
        "train: 1 images have only masks of four corners, like oriented boxes. Boxes are "
        "axis-aligned: train.jpg"
    ]
    (tmp_path / "train" / "labels" / "train.txt").write_text(row_of(SQUARE[:3]))
    assert not yolo_splits(tmp_path)["train"].notes
