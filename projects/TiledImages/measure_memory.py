# Copyright (c) the d2_memfit developers.
"""Measure the growth of memory with the size of an image, for this project and SAHI.

    python projects/TiledImages/measure_memory.py --weights output/tiled/model_final.pth

For each size it makes an image of coins in a temporary folder. It detects the coins with
configs/mask_rcnn_coins_tiled.yaml, each time in its own process. Needs rasterio. SAHI takes part if
it is installed. It slices and merges with its defaults, in tiles of the same size and overlap,
without its second pass over the whole image. A coin counts as found with a box of an IoU of at
least 0.5, and as found twice with a second such box.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

import numpy as np
import torch
from detectron2.modeling import build_model
from detectron2.solver import build_optimizer
from make_large_images import make_dataset
from pycocotools import mask as coco_mask
from tiled_images import (
    CocoResultsWriter,
    TiledPredictor,
    build_tiled_train_loader,
    load_tiled_cfg,
    to_coco,
)

from d2_memfit import AccumulatingTrainer
from d2_memfit.data import register_coco
from d2_memfit.engine.resuming import MemfitCheckpointer
from d2_memfit.memory import TensorMeter

CONFIG = Path(__file__).parent / "configs" / "mask_rcnn_coins_tiled.yaml"
TILE, OVERLAP = 1024, 128
MIN_SCORE = 0.3  # SAHI's default; from 0.1 down it does not merge


def ours(cfg: Any, image: Path, folder: Path) -> None:
    model = build_model(cfg).eval()
    MemfitCheckpointer(model).load(cfg.MODEL.WEIGHTS)
    with CocoResultsWriter(str(folder / "results.json")) as results:
        results.write(to_coco(d, 0) for d in TiledPredictor(cfg, model).detect(str(image)))


def sahi(cfg: Any, image: Path, folder: Path) -> None:
    from sahi import AutoDetectionModel
    from sahi.predict import get_sliced_prediction

    (folder / "config.yaml").write_text(cfg.dump())
    model = AutoDetectionModel.from_pretrained(
        model_type="detectron2",
        model_path=cfg.MODEL.WEIGHTS,
        config_path=str(folder / "config.yaml"),
        confidence_threshold=MIN_SCORE,
        category_mapping={"0": "coin"},
        device=cfg.MODEL.DEVICE,
    )
    result = get_sliced_prediction(
        str(image),
        model,
        slice_height=TILE,
        slice_width=TILE,
        overlap_height_ratio=OVERLAP / TILE,
        overlap_width_ratio=OVERLAP / TILE,
        perform_standard_pred=False,
    )
    (folder / "results.json").write_text(json.dumps(result.to_coco_predictions(image_id=0)))


def ours_training(cfg: Any, image: Path, folder: Path) -> None:
    """Train three iterations on tiles of this image."""
    name, split = "large_coins", image.parent
    register_coco(name, str(split.with_suffix(".json")), str(split))
    cfg.merge_from_list(["DATASETS.TRAIN", (name,), "OUTPUT_DIR", str(folder)])
    model = build_model(cfg)
    loader = build_tiled_train_loader(cfg)
    AccumulatingTrainer(model, loader, build_optimizer(cfg, model)).train(0, 3)
    (folder / "results.json").write_text("[]")


SIDES: dict[str, Callable[[Any, Path, Path], None]] = {
    "ours": ours,
    "sahi": sahi,
    "ours, training": ours_training,
}


def measure(side: str, image: Path, weights: Path, folder: Path) -> dict[str, Any]:
    """Measure one side on one image, in this process."""
    opts: list[Any] = [
        "TILES.SIZE",
        TILE,
        "TILES.OVERLAP",
        OVERLAP,
        "TEST.DETECTIONS_PER_IMAGE",
        300,
    ]
    opts += ["MODEL.WEIGHTS", str(weights), "MODEL.ROI_HEADS.SCORE_THRESH_TEST", MIN_SCORE]
    cfg = load_tiled_cfg(str(CONFIG), opts)
    cfg.MODEL.RPN.POST_NMS_TOPK_TEST = cfg.MODEL.RPN.PRE_NMS_TOPK_TEST = 300
    cfg.DATALOADER.NUM_WORKERS = 0
    start = time.perf_counter()
    with TensorMeter() as meter:
        SIDES[side](cfg, image, folder)
    seconds, host_kib = time.perf_counter() - start, peak_of_process_kib()
    once, again = count_coins(image.parent.with_suffix(".json"), folder / "results.json")
    return {
        "found": once,
        "found_again": again,
        "tensors_mib": meter.peak_bytes / 2**20,
        "host_mib": host_kib / 2**10,
        "results_mib": (folder / "results.json").stat().st_size / 2**20,
        "seconds": seconds,
    }


def count_coins(annotations: Path, results: Path) -> tuple[int, int]:
    """Number of coins that have a box with an IoU of at least 0.5, and number of further boxes."""
    coins = [a["bbox"] for a in json.loads(annotations.read_text())["annotations"]]
    boxes = [r["bbox"] for r in json.loads(results.read_text())]
    if not boxes:
        return 0, 0
    matches = coco_mask.iou(np.array(boxes), np.array(coins), [0] * len(coins)) >= 0.5
    once = int(matches.any(axis=0).sum())
    return once, int(matches.sum()) - once


def peak_of_process_kib() -> int:
    """Peak memory of this process, from VmHWM in /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2048, 8192, 20000])
    parser.add_argument("--sides", choices=list(SIDES), nargs="+", default=list(SIDES))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # a side and an image
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.one:
            side, image = args.one
            print(json.dumps(measure(side, Path(image), args.weights, folder)))
            return
        print(f"Tiles of {TILE} pixels, CPU, {torch.get_num_threads()} threads.\n")
        columns = "tensors, peak MiB | process, peak MiB | results, MiB | found | twice | s"
        print(f"| image | | {columns} |\n" + "| --- " * 8 + "|")
        for size in args.sizes:
            make_dataset(folder, "val", size, images=1)
            coins = len(json.loads((folder / "val.json").read_text())["annotations"])
            for side in args.sides:
                m = run_alone(side, folder / "val" / "000.tif", args.weights)
                print(
                    f"| {size} x {size} | {side} | {m['tensors_mib']:.0f} | {m['host_mib']:.0f} | "
                    f"{m['results_mib']:.1f} | {m['found']} of {coins} | {m['found_again']} | "
                    f"{m['seconds']:.0f} |",
                    flush=True,
                )


def run_alone(side: str, image: Path, weights: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--weights", weights, "--one", side, image]
    result = subprocess.run(
        [str(c) for c in command], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(result.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
