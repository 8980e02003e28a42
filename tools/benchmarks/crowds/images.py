# Copyright (c) the d2_memfit developers.
"""Crowded images from photographs: cut-out objects, many times over, on a blurred photograph."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import cv2
import numpy as np
from numpy.typing import NDArray
from skimage import data

from .. import common  # which makes make_dataset of projects/Coins importable

assert common
from make_dataset import coin_annotation, find_coins, write_png  # noqa: E402

MAX_CUT_OUTS = 200
MIN_SIDE = 16  # of a cut-out in its photograph, in pixels
MAX_SIDE = 96  # of an object in a crowded image, in pixels

Pixels = NDArray[np.uint8]


class CutOut(NamedTuple):
    """An object in its photograph: pixels [H, W, 3] in BGR, and its mask [H, W] of 0 and 1."""

    pixels: Pixels
    mask: Pixels


def coins() -> tuple[Pixels, list[CutOut]]:
    """The photograph of scikit-image with its 24 coins."""
    photograph = data.coins()
    labels = find_coins(photograph)
    pixels = cv2.cvtColor(photograph, cv2.COLOR_GRAY2BGR)
    masks = [(labels == number).astype(np.uint8) for number in range(1, labels.max() + 1)]
    return pixels, [cut_out(pixels, mask) for mask in masks]


def coco(json_file: Path, folder: Path) -> tuple[Pixels, list[CutOut]]:
    """The first photograph of a COCO dataset, and objects with polygons from the first ones."""
    dataset = json.loads(json_file.read_text())
    files = {image["id"]: image["file_name"] for image in dataset["images"]}
    photographs: dict[int, Pixels] = {}
    found = []
    for annotation in dataset["annotations"]:
        polygons = annotation["segmentation"]
        if not isinstance(polygons, list) or min(annotation["bbox"][2:]) < MIN_SIDE:
            continue
        number = annotation["image_id"]
        if number not in photographs:
            photographs[number] = cv2.imread(str(folder / files[number]))
        mask = np.zeros(photographs[number].shape[:2], np.uint8)
        points = [np.array(p).round().astype(np.int32).reshape(-1, 2) for p in polygons]
        cv2.fillPoly(mask, points, 1)
        found.append(cut_out(photographs[number], mask))
        if len(found) == MAX_CUT_OUTS:
            break
    return next(iter(photographs.values())), found


def cut_out(pixels: Pixels, mask: Pixels) -> CutOut:
    x, y, width, height = cv2.boundingRect(mask)
    part = slice(y, y + height), slice(x, x + width)
    return CutOut(pixels[part], mask[part])


def make_crowds(
    folder: Path, counts: Sequence[int], size: int, source: Optional[Sequence[Path]] = None
) -> None:
    """Write ``crowds.json`` in COCO's format, and its images of ``size`` x ``size`` pixels.

    Args:
        counts: number of objects in each image.
        source: a COCO file and the folder of its images; None for coins.
    """
    photograph, cut_outs = coco(*source) if source else coins()
    background = cv2.GaussianBlur(cv2.resize(photograph, (size, size)), (0, 0), size / 20)
    rng = np.random.default_rng(0)
    dataset: dict[str, Any] = {"categories": [{"id": 1, "name": "object"}]}
    dataset["images"], dataset["annotations"] = [], []
    for number, count in enumerate(counts):
        image = background.copy()
        for annotation in pasted(image, cut_outs, count, rng):
            ids = {"id": len(dataset["annotations"]) + 1, "image_id": number}
            dataset["annotations"].append({**annotation, **ids})
        name = f"{number:03d}.png"
        write_png(folder / name, image)
        dataset["images"].append({"id": number, "file_name": name, "height": size, "width": size})
    (folder / "crowds.json").write_text(json.dumps(dataset))


def pasted(
    image: Pixels, cut_outs: Sequence[CutOut], count: int, rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """Paste objects into the cells of a grid, so that none hides another.

    Yields:
        COCO's annotation of each, without its ids.
    """
    columns = int(np.ceil(np.sqrt(count)))
    cell = image.shape[0] // columns
    for place in rng.permutation(columns**2)[:count]:
        chosen = cut_outs[rng.integers(len(cut_outs))]
        side = min(cell, MAX_SIDE) * rng.uniform(0.7, 1.0)
        scale = side / max(chosen.mask.shape)
        width, height = (max(int(scale * n), 3) for n in chosen.mask.shape[::-1])
        mask = cv2.resize(chosen.mask, (width, height), interpolation=cv2.INTER_NEAREST)
        pixels = cv2.resize(chosen.pixels, (width, height), interpolation=cv2.INTER_AREA)
        left = int(place % columns * cell + rng.integers(cell - width + 1))
        top = int(place // columns * cell + rng.integers(cell - height + 1))
        part = image[top : top + height, left : left + width]
        part[mask > 0] = pixels[mask > 0]
        yield moved(coin_annotation(mask > 0), left, top)


def moved(annotation: dict[str, Any], left: int, top: int) -> dict[str, Any]:
    """An annotation of a part of an image as one of the whole image."""
    x, y, width, height = annotation["bbox"]
    polygon = np.array(annotation["segmentation"][0]).reshape(-1, 2) + np.array([left, top])
    places = {
        "bbox": [x + left, y + top, width, height],
        "segmentation": [polygon.ravel().tolist()],
    }
    return {**annotation, **places}
