# Copyright (c) the d2_memfit developers.
"""Make large images of coins as tiled TIFF, in COCO's format, in little memory.

    python projects/TiledImages/make_large_images.py FOLDER [--split val] [--size 4096] [--images 2]

The coins are those of projects/Coins: views of a photograph, scattered over a dark ground. Most of
an image has none. Needs rasterio. The same seed gives the same files.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from skimage import data

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "Coins"))
from make_dataset import (
    MIN_VISIBLE_PIXELS,
    SPLITS,
    coin_annotation,
    files_of_dataset,
    find_coins,
    random_view,
)

from d2_memfit.common.files import check_outputs, output_file
from d2_memfit.errors import exit_on_error

_CELL = 256, 512  # height and width of the ground that a view lies on
_DENSITY = 0.3  # share of the ground's cells with a view


def make_image(path: Path, size: int, split: str, seed: int) -> list[dict[str, Any]]:
    """Write an image of ``size`` x ``size`` pixels.

    Returns:
        COCO's annotations of its coins, without their ids.
    """
    import rasterio  # an optional extra

    rng, rows, annotations = np.random.default_rng(seed), SPLITS[split][0], []
    coins = data.coins()[rows], find_coins(data.coins())[rows]
    options = {"driver": "GTiff", "width": size, "height": size, "count": 3, "dtype": "uint8"}
    options.update(tiled=True, blockxsize=256, blockysize=256, compress="deflate", zlevel=1)
    with output_file(path) as output, rasterio.open(output.name, "w", **options) as file:
        for y in range(0, size, _CELL[0]):
            for x in range(0, size, _CELL[1]):
                shape = min(_CELL[0], size - y), min(_CELL[1], size - x)
                cell = rng.integers(20, 40, shape, dtype=np.uint8)
                if rng.random() < _DENSITY:
                    view, labels = (a[: shape[0], : shape[1]] for a in random_view(*coins, rng))
                    for coin in np.unique(labels[labels > 0]):
                        mask = np.zeros(shape, bool)
                        mask[: view.shape[0], : view.shape[1]] = labels == coin
                        if mask.sum() >= MIN_VISIBLE_PIXELS:
                            cell[mask] = view[labels == coin]
                            annotations.append(coin_annotation(mask, x, y))
                window = ((y, y + shape[0]), (x, x + shape[1]))
                file.write(np.broadcast_to(cell, (3, *shape)), window=window)
    return annotations


def make_dataset(folder: Path, split: str, size: int, images: int, seed: int = 0) -> None:
    """Write ``<split>.json`` and its images to ``folder``.

    Raises:
        ConfigError: a file there is another one's.
    """
    check_outputs(files_of_dataset(folder, {split: images}, ".tif"))
    coco: dict[str, list[Any]] = {"images": [], "annotations": []}
    coco["categories"] = [{"id": 1, "name": "coin"}]
    for image_id in range(images):
        name = f"{image_id:03d}.tif"
        found = make_image(folder / split / name, size, split, seed + image_id)
        coco["images"].append({"id": image_id, "file_name": name, "height": size, "width": size})
        first = len(coco["annotations"]) + 1
        coco["annotations"] += [
            {**a, "id": i, "image_id": image_id} for i, a in enumerate(found, start=first)
        ]
    with output_file(folder / f"{split}.json", "w") as file:
        json.dump(coco, file)


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
