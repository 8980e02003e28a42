# Copyright (c) the d2_memfit developers.
"""Make large images of coins as tiled TIFF, in COCO's format, in little memory.

    python projects/TiledImages/make_large_images.py FOLDER [--split val] [--size 4096] [--images 2]

The coins are those of projects/Coins: views of a photograph, scattered over a dark ground. Most of
an image has none. Needs rasterio. The same seed gives the same files.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
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

    rng = np.random.default_rng(seed)
    photograph = data.coins()
    rows = SPLITS[split][0]
    coins = photograph[rows], find_coins(photograph)[rows]
    profile = {"driver": "GTiff", "width": size, "height": size, "count": 3, "dtype": "uint8"}
    storage = {"tiled": True, "blockxsize": 256, "blockysize": 256, "compress": "deflate"}
    annotations = []
    storage |= {"zlevel": 1, "interleave": "pixel"}
    with output_file(path) as output, rasterio.open(output.name, "w", **profile, **storage) as file:
        for top in range(0, size, _CELL[0]):
            for left in range(0, size, _CELL[1]):
                height, width = min(_CELL[0], size - top), min(_CELL[1], size - left)
                cell = rng.integers(20, 40, (height, width), dtype=np.uint8)
                if rng.random() < _DENSITY:
                    annotations += _strew(cell, left, top, *random_view(*coins, rng), rng)
                window = ((top, top + height), (left, left + width))
                file.write(np.broadcast_to(cell, (3, height, width)), window=window)
    return annotations


def _strew(
    cell: NDArray[Any],
    left: int,
    top: int,
    view: NDArray[Any],
    labels: NDArray[Any],
    rng: np.random.Generator,
) -> list[dict[str, Any]]:
    """Put the coins of a view at a random place in a cell, and return their annotations."""
    height, width = min(view.shape[0], cell.shape[0]), min(view.shape[1], cell.shape[1])
    view, labels = view[:height, :width], labels[:height, :width]
    y = int(rng.integers(cell.shape[0] - height + 1))
    x = int(rng.integers(cell.shape[1] - width + 1))
    annotations = []
    for coin in np.unique(labels[labels > 0]):
        mask = labels == coin
        if mask.sum() >= MIN_VISIBLE_PIXELS:
            cell[y : y + height, x : x + width][mask] = view[mask]
            annotation = coin_annotation(mask)
            annotation["bbox"][0] += left + x
            annotation["bbox"][1] += top + y
            (polygon,) = annotation["segmentation"]
            polygon[::2] = [v + left + x for v in polygon[::2]]
            polygon[1::2] = [v + top + y for v in polygon[1::2]]
            annotations.append(annotation)
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
        for annotation in found:
            number = {"id": len(coco["annotations"]) + 1, "image_id": image_id}
            coco["annotations"].append({**number, **annotation})
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
    here = Path(__file__).parent
    words = ["python", str(here / "train_tiles.py")]
    words += ["--config-file", str(here / "configs" / "mask_rcnn_coins_tiled.yaml")]
    for split in SPLITS:
        file = args.folder / f"{split}.json"
        if not file.exists():
            words = ["python", __file__, str(args.folder), "--split", split]
            break
        words += ["--coco", f"tiled_{split}", str(file), str(args.folder / split)]
    print(f"Written: {args.folder / args.split}\nNext:\n  {shlex.join(words)}")


if __name__ == "__main__":
    main()
