# Copyright (c) the d2_memfit developers.
"""Small datasets in COCO's format."""

from PIL import Image

SIZE = 64, 48  # width and height


def coco_of(number, classes_of=lambda i: [1], folder=None):
    """A COCO file's content with an object of each class in images that are perhaps saved."""
    images, annotations = [], []
    for i in range(number):
        images.append({"id": i, "file_name": f"{i}.jpg", "width": SIZE[0], "height": SIZE[1]})
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", SIZE).save(folder / f"{i}.jpg")
        for c in classes_of(i):
            numbers = {"id": len(annotations) + 1, "image_id": i, "category_id": c}
            annotations.append({**numbers, "bbox": [8, 8, 16, 16], "area": 256, "iscrowd": 0})
    names = sorted({a["category_id"] for a in annotations})
    categories = [{"id": c, "name": f"class {c}"} for c in names]
    return {"images": images, "annotations": annotations, "categories": categories}
