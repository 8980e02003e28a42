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
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from skimage import data, filters, measure, morphology, segmentation

from d2_memfit.common.files import check_outputs, output_file
from d2_memfit.errors import exit_on_error

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


def coin_annotation(mask: NDArray[np.bool_], left: int = 0, top: int = 0) -> dict[str, Any]:
    """COCO's annotation of one coin, without its ids.

    Args:
        mask: (H, W) bool.
        left, top: place of the mask in the image.
    """
    contours, _ = cv2.findContours(
        mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE, offset=(left, top)
    )
    polygon = max(contours, key=cv2.contourArea)
    x, y, w, h = cv2.boundingRect(polygon)
    return {
        "category_id": 1,
        "segmentation": [polygon.flatten().astype(float).tolist()],
        "bbox": [x, y, w, h],
        "area": int(mask.sum()),
        "iscrowd": 0,
    }


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
        coco = {"images": [], "annotations": [], "categories": [{"id": 1, "name": "coin"}]}
        for image_id in range(num_images):
            image, mask = random_view(photograph[rows], labels[rows], rng)
            name = f"{image_id:03d}.png"
            write_png(folder / split / name, image)
            size = dict(zip(("height", "width"), image.shape))
            coco["images"].append({"id": image_id, "file_name": name, **size})
            for coin in np.unique(mask[mask > 0]):
                if (mask == coin).sum() >= MIN_VISIBLE_PIXELS:
                    ids = {"id": len(coco["annotations"]) + 1, "image_id": image_id}
                    coco["annotations"].append({**ids, **coin_annotation(mask == coin)})
        with output_file(folder / f"{split}.json", "w") as file:
            json.dump(coco, file)


def files_of_dataset(folder: Path, num_images: dict[str, int], ending: str = ".png") -> list[Path]:
    """The files of a dataset with this number of images in each part."""
    images = [(split, number) for split in num_images for number in range(num_images[split])]
    parts = [folder / f"{split}.json" for split in num_images]
    return parts + [folder / split / f"{number:03d}{ending}" for split, number in images]


def write_png(path: Path, image: Image) -> None:
    """Write an image (H, W), or (H, W, 3) in BGR."""
    with output_file(path) as file:
        file.write(cv2.imencode(".png", image)[1].tobytes())


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
