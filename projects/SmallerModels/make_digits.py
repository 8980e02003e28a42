# Copyright (c) the d2_memfit developers.
"""Make a detection dataset in COCO's format: handwritten digits on photographs.

    python projects/SmallerModels/make_digits.py FOLDER

The digits are real: ``sklearn.datasets.load_digits()`` has 1797 of them, 8 x 8 pixels, written by
people (E. Alpaydin and C. Kaynak, https://archive.ics.uci.edu/dataset/80). So are the photographs:
those of ``sklearn.datasets.load_sample_images()``. Both are part of scikit-learn. The scenes are
composed: each is a crop of a photograph with three to five enlarged digits on it. Training images
have the first 1200 digits and the left part of the photographs, validation images the other digits
and the right part. The same seed gives the same files.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from d2_memfit.common.files import check_outputs, output_file
from d2_memfit.errors import exit_on_error

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "Coins"))
from make_dataset import files_of_dataset, write_png

Image = NDArray[np.uint8]

HEIGHT, WIDTH = 112, 160
SIDES = (28, 44)  # of an enlarged digit, in pixels
NUM_TRAIN_DIGITS = 1200
NUM_IMAGES = {"train": 256, "val": 48}
SPLIT_COLUMN = 400  # between the parts of the photographs
SEEDS = {"train": 0, "val": 1}
INK = 6  # of 16: what is darker belongs to the digit


def place(taken: list[tuple[int, int, int]], rng: np.random.Generator) -> tuple[int, int, int]:
    """Find a square that touches none of those taken.

    Returns:
        left, top and side, in pixels; the side is 0 if none was found.
    """
    for _ in range(50):
        side = int(rng.integers(SIDES[0], SIDES[1] + 1))
        left, top = int(rng.integers(0, WIDTH - side)), int(rng.integers(0, HEIGHT - side))
        if all(
            left + side < x or x + s < left or top + side < y or y + s < top for x, y, s in taken
        ):
            return left, top, side
    return 0, 0, 0


def draw(image: Image, digit: NDArray[Any], square: tuple[int, int, int], ink: Image) -> list[int]:
    """Draw an enlarged digit.

    Args:
        image: (H, W, 3), changed in place.
        digit: (8, 8), 0 to 16.
        square: left, top and side.
        ink: (3,), the colour.

    Returns:
        the box of its pixels, as x, y, width and height.
    """
    left, top, side = square
    mask = cv2.resize(digit.astype(np.float32), (side, side), interpolation=cv2.INTER_CUBIC) > INK
    image[top : top + side, left : left + side][mask] = ink
    x, y, width, height = cv2.boundingRect(mask.astype(np.uint8))
    return [left + x, top + y, width, height]


def make_scene(
    photograph: Image, digits: NDArray[Any], labels: NDArray[Any], rng: np.random.Generator
) -> tuple[Image, list[dict[str, Any]]]:
    """A scene, and COCO's annotations of its digits without their ids."""
    height, width = photograph.shape[:2]
    top, left = rng.integers(0, height - HEIGHT + 1), rng.integers(0, width - WIDTH + 1)
    image = photograph[top : top + HEIGHT, left : left + WIDTH].copy()
    taken: list[tuple[int, int, int]] = []
    annotations = []
    for index in rng.choice(len(digits), int(rng.integers(3, 6)), replace=False):
        square = place(taken, rng)
        if square[2] == 0:
            continue
        taken.append(square)
        # Light ink on dark ground, dark ink on light ground.
        x, y, side = square
        is_dark = image[y : y + side, x : x + side].mean() < 128
        ink = (rng.integers(0, 60, 3) + (195 if is_dark else 0)).astype(np.uint8)
        box = draw(image, digits[index], square, ink)
        annotation = {"category_id": int(labels[index]) + 1, "bbox": box, "iscrowd": 0}
        annotations.append({**annotation, "area": box[2] * box[3]})
    return image, annotations


def make_digits(folder: Path) -> None:
    """Write ``train.json``, ``val.json`` and their images to ``folder``.

    Raises:
        ConfigError: a file there is another one's.
    """
    check_outputs(files_of_dataset(folder, NUM_IMAGES))
    try:
        from sklearn.datasets import load_digits, load_sample_images
    except ImportError as error:
        sys.exit(f"error: the digits are scikit-learn's ({error}): pip install scikit-learn")
    digits, labels = load_digits().images, load_digits().target
    photographs = load_sample_images().images
    digits_of = {"train": slice(None, NUM_TRAIN_DIGITS), "val": slice(NUM_TRAIN_DIGITS, None)}
    columns_of = {"train": slice(None, SPLIT_COLUMN), "val": slice(SPLIT_COLUMN, None)}
    categories = [{"id": digit + 1, "name": str(digit)} for digit in range(10)]
    for split, part in digits_of.items():
        rng = np.random.default_rng(SEEDS[split])
        coco: dict[str, list[Any]] = {"images": [], "annotations": [], "categories": categories}
        for image_id in range(NUM_IMAGES[split]):
            photograph = photographs[image_id % len(photographs)][:, columns_of[split]]
            image, annotations = make_scene(photograph, digits[part], labels[part], rng)
            name = f"{image_id:03d}.png"
            write_png(folder / split / name, image[:, :, ::-1])
            size = {"height": HEIGHT, "width": WIDTH}
            coco["images"].append({"id": image_id, "file_name": name, **size})
            for annotation in annotations:
                ids = {"id": len(coco["annotations"]) + 1, "image_id": image_id}
                coco["annotations"].append({**ids, **annotation})
        with output_file(folder / f"{split}.json", "w") as file:
            json.dump(coco, file)


@exit_on_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    make_digits(folder)
    config = Path(__file__).parent / "configs" / "digits_resnet18.yaml"
    words = ["d2-memfit", "train", "--config-file", str(config)]
    for split in NUM_IMAGES:
        words += ["--coco", f"digits_{split}", f"{folder}/{split}.json", f"{folder}/{split}"]
    print(f"Written: {folder}\nNext, train on it:\n  {shlex.join(words)}")


if __name__ == "__main__":
    main()
