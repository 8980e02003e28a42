# Copyright (c) the d2_memfit developers.
"""Make large images of coins as tiled TIFF, in COCO's format, in little memory.

    python projects/TiledImages/make_large_images.py FOLDER [--split val] [--size 4096] [--images 2]

The coins are those of projects/Coins: views of a photograph, scattered over a dark ground. Most of
an image has none. The same arguments give the same files.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from skimage import data

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "Coins"))
from make_dataset import SPLITS, coins_of, files_of_dataset, find_coins, random_view, write_coco

from d2_memfit.common.errors import exit_on_error
from d2_memfit.common.files import check_outputs, output_file

_CELL = 256, 512  # height and width of the ground that a view lies on
_DENSITY = 0.3  # share of the ground's cells with a view


def make_image(path: Path, size: int, split: str, seed: int) -> list[dict[str, Any]]:
    """Write an image of ``size`` x ``size`` pixels; return COCO's annotations of its coins."""
    rng, rows, annotations = np.random.default_rng(seed), SPLITS[split][0], []
    coins = data.coins()[rows], find_coins(data.coins())[rows]
    options = {"driver": "GTiff", "width": size, "height": size, "count": 3, "dtype": "uint8"}
    options.update(tiled=True, blockxsize=256, blockysize=256, compress="deflate", zlevel=1)
    with output_file(path) as output, rasterio.open(output.name, "w", **options) as file:
        for y in range(0, size, _CELL[0]):
            for x in range(0, size, _CELL[1]):
                height, width = min(_CELL[0], size - y), min(_CELL[1], size - x)
                cell = rng.integers(20, 40, (height, width), dtype=np.uint8)
                if rng.random() < _DENSITY:
                    view, labels = (a[:height, :width] for a in random_view(*coins, rng))
                    for mask, annotation in coins_of(labels, x, y):
                        cell[: len(mask), : mask.shape[1]][mask] = view[mask]
                        annotations.append(annotation)
                window = ((y, y + height), (x, x + width))
                file.write(np.broadcast_to(cell, (3, height, width)), window=window)
    return annotations


def make_dataset(folder: Path, split: str, size: int, num_images: int) -> None:
    """Write ``<split>.json`` and its images to ``folder``.

    Raises:
        ConfigError: a file there is another one's.
    """
    file, *images = files_of_dataset(folder, {split: num_images}, ".tif")
    check_outputs([file, *images])
    found = [make_image(image, size, split, seed) for seed, image in enumerate(images)]
    write_coco(file, [(image.name, (size, size), a) for image, a in zip(images, found)])


@exit_on_error
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--split", choices=list(SPLITS), default="train")
    parser.add_argument("--size", type=int, default=4096, help="height and width in pixels")
    parser.add_argument("--images", type=int, default=2)
    args = parser.parse_args()
    make_dataset(args.folder, args.split, args.size, args.images)
    print(f"Written: {args.folder / args.split}")


if __name__ == "__main__":
    main()
