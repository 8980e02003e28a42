# Copyright (c) the d2_memfit developers.
"""Small datasets as YOLO, Pascal VOC and others write them, in folders."""

import json

import numpy as np
from PIL import Image

SIZE = 64, 48  # width and height
SQUARE = [[8, 8], [24, 8], [24, 24], [8, 24]]


def save_image(file, size=SIZE, **options):
    file.parent.mkdir(parents=True, exist_ok=True)
    width, height = size
    pixels = np.random.default_rng(len(file.name)).integers(0, 255, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(file, **options)


def row_of(corners, number=0, size=SIZE):
    """A line of YOLO: a class and the corners of a polygon in pixels."""
    return " ".join(
        map(str, [number, *(n / size[i] for x_y in corners for i, n in enumerate(x_y))])
    )


def box_row(x, y, w, h, number=0, size=SIZE):
    return row_of([[x + w / 2, y + h / 2], [w, h]], number, size)


def write_yolo(folder, rows=None, splits=("train", "val"), **data):
    """A folder of YOLO with an image for each split.

    Args:
        rows: lines of the label file in the split train; None is two boxes.
        data: entries of data.yaml.
    """
    rows = [box_row(8, 8, 16, 16), box_row(30, 10, 20, 12, 1)] if rows is None else rows
    for split in splits:
        save_image(folder / split / "images" / f"{split}.jpg")
        labels = folder / split / "labels"
        labels.mkdir()
        (labels / f"{split}.txt").write_text("\n".join(rows if split == "train" else rows[:2]))
    data = {**{split: f"{split}/images" for split in splits}, "names": ["coin", "ring"], **data}
    (folder / "data.yaml").write_text(json.dumps(data))  # which is YAML too
    return folder


def xml_of(objects, size=SIZE, tag="annotation"):
    """Pascal VOC's XML of objects, which are a name, corners of a box, and more XML."""
    text = "".join(
        f"<object><name>{name}</name><bndbox><xmin>{x0}</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax>"
        f"<ymax>{y1}</ymax></bndbox>{more}</object>"
        for name, (x0, y0, x1, y1), more in objects
    )
    width, height = size
    size = f"<size><width>{width}</width><height>{height}</height></size>"
    return f"<{tag}>{size}{text}</{tag}>"


def polygon_xml(*corners):
    """A polygon of pixels that are counted from 0."""
    inner = "".join(
        f"<{axis}{i}>{n + 1}</{axis}{i}>"
        for i, x_y in enumerate(corners)
        for axis, n in zip("xy", x_y)
    )
    return f"<polygon>{inner}</polygon>"


def write_voc(folder, lists=None, number=4, objects=(("coin", (9, 9, 24, 24), ""),)):
    """A folder of Pascal VOC with images 0 to ``number``, and lists by part."""
    for i in range(number):
        save_image(folder / "JPEGImages" / f"{i}.jpg")
        (folder / "Annotations").mkdir(exist_ok=True)
        (folder / "Annotations" / f"{i}.xml").write_text(xml_of(objects))
    for name, ids in (lists or {}).items():
        file = folder / "ImageSets" / "Main" / f"{name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{i}\n" for i in ids))
    return folder


def coco_of(number, classes_of=lambda i: [1], folder=None, **changes):
    """A COCO file's content with an object of each class in images that are perhaps saved."""
    images, annotations = [], []
    for i in range(number):
        images.append({"id": i, "file_name": f"{i}.jpg", "width": SIZE[0], "height": SIZE[1]})
        if folder is not None:
            save_image(folder / f"{i}.jpg")
        for c in classes_of(i):
            numbers = {"id": len(annotations) + 1, "image_id": i, "category_id": c}
            annotations.append({**numbers, "bbox": [8, 8, 16, 16], "area": 256, "iscrowd": 0})
    names = sorted({a["category_id"] for a in annotations})
    categories = [{"id": c, "name": f"class {c}"} for c in names]
    return {"images": images, "annotations": annotations, "categories": categories, **changes}
