# Copyright (c) the d2_memfit developers.
"""Make a small instance-segmentation dataset in COCO's format from one photograph of 24 coins.

    python projects/Coins/make_dataset.py FOLDER

The photograph is ``skimage.data.coins()`` (Greek coins from Pompeii, Brooklyn Museum; no known
copyright restrictions), which is part of scikit-image. Masks are found by thresholding, watershed
and labelling. Training images are crops, flips and scales of its upper half, validation images of
its lower half. A gap between two rows of coins separates the halves. The same seed gives the same
files.
"""

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from skimage import data, filters, measure, morphology, segmentation

from d2_memfit.common.errors import exit_on_error
from d2_memfit.common.files import check_outputs, output_file

Image = NDArray[np.uint8]
Labels = NDArray[Any]  # of integers

SPLIT_ROW = 150  # between the second and the third row of coins
SPLITS = {"train": (slice(None, SPLIT_ROW), 64), "val": (slice(SPLIT_ROW, None), 16)}
MIN_VISIBLE_PIXELS = 100  # a smaller part of a coin, at a crop's border, is not an object


def find_coins(photograph: Image) -> Labels:
    """Label the coins.

    Args:
        photograph: (H, W) uint8.

    Returns:
        (H, W) int: 0 for background, and a number for each coin.
    """
    seeds = np.zeros(photograph.shape, dtype=int)
    seeds[photograph < 30] = 1
    seeds[photograph > 150] = 2
    is_coin = segmentation.watershed(filters.sobel(photograph), seeds) == 2
    is_coin = morphology.remove_small_objects(ndimage.binary_fill_holes(is_coin), 200)
    return measure.label(is_coin)


def random_view(
    photograph: Image, labels: Labels, rng: np.random.Generator
) -> tuple[Image, Labels]:
    """A random crop of both, flipped and scaled."""
    height, width = photograph.shape
    h = rng.integers(int(0.75 * height), height + 1)
    w = rng.integers(int(1.1 * height), int(1.6 * height))
    top, left = rng.integers(0, height - h + 1), rng.integers(0, width - w + 1)
    views = [a[top : top + h, left : left + w] for a in (photograph, labels.astype(np.int16))]
    for axis in (0, 1):
        if rng.random() < 0.5:
            views = [np.flip(a, axis) for a in views]
    scale = rng.uniform(1.0, 1.6)
    image = cv2.resize(np.ascontiguousarray(views[0]), None, fx=scale, fy=scale)
    mask = cv2.resize(
        np.ascontiguousarray(views[1]), image.shape[::-1], interpolation=cv2.INTER_NEAREST
    )
    return image, mask


def coins_of(
    labels: Labels, left: int = 0, top: int = 0
) -> Iterator[tuple[NDArray[np.bool_], dict[str, Any]]]:
    """Yield the mask and COCO's annotation, without its ids, of each coin that shows enough.

    Args:
        labels: (H, W) int, as of :func:`find_coins`.
        left, top: place of the labels in the image.
    """
    for coin in np.unique(labels[labels > 0]):
        mask = labels == coin
        if mask.sum() < MIN_VISIBLE_PIXELS:
            continue
        contours, _ = cv2.findContours(
            mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE, offset=(left, top)
        )
        polygon = max(contours, key=cv2.contourArea)
        polygons, box = [polygon.flatten().astype(float).tolist()], cv2.boundingRect(polygon)
        shape = {"segmentation": polygons, "bbox": list(box), "area": int(mask.sum())}
        yield mask, {"category_id": 1, "iscrowd": 0, **shape}


def make_dataset(folder: Path, seed: int = 0) -> None:
    """Write ``train.json``, ``val.json`` and their images to ``folder``.

    Raises:
        ConfigError: a file there is another one's.
    """
    numbers = {split: num_images for split, (_, num_images) in SPLITS.items()}
    check_outputs(files_of_dataset(folder, numbers))
    photograph = data.coins()
    labels = find_coins(photograph)
    rng = np.random.default_rng(seed)
    for split, (rows, num_images) in SPLITS.items():
        file, *images = files_of_dataset(folder, {split: num_images})
        made = []
        for path in images:
            image, mask = random_view(photograph[rows], labels[rows], rng)
            with output_file(path) as output:
                output.write(cv2.imencode(".png", image)[1].tobytes())
            made.append((path.name, image.shape, [a for _, a in coins_of(mask)]))
        write_coco(file, made)


def write_coco(path: Path, images: Sequence[tuple[str, tuple[int, ...], list[Any]]]) -> None:
    """Write a COCO file of images: a name, height and width, and annotations without ids."""
    coco = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "coin"}]}
    for image_id, (name, (height, width), annotations) in enumerate(images):
        size = {"height": height, "width": width}
        coco["images"].append({"id": image_id, "file_name": name, **size})
        for number, annotation in enumerate(annotations, start=len(coco["annotations"]) + 1):
            coco["annotations"].append({"id": number, "image_id": image_id, **annotation})
    with output_file(path, "w") as file:
        json.dump(coco, file)


def files_of_dataset(folder: Path, num_images: dict[str, int], ending: str = ".png") -> list[Path]:
    """The files of a dataset with this number of images in each part: first its COCO files."""
    images = [(split, number) for split in num_images for number in range(num_images[split])]
    parts = [folder / f"{split}.json" for split in num_images]
    return parts + [folder / split / f"{number:03d}{ending}" for split, number in images]


@exit_on_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    make_dataset(folder)
    config = Path(__file__).parent / "configs" / "mask_rcnn_coins.yaml"
    words = ["d2-memfit", "train", "--config-file", str(config)]
    for split in SPLITS:
        words += ["--coco", f"coins_{split}", f"{folder}/{split}.json", f"{folder}/{split}"]
    print(f"Written: {folder}\nNext, train on it:\n  {shlex.join(words)}")


if __name__ == "__main__":
    main()
