# Copyright (c) the d2_memfit developers.
"""Windows cut by predicted bytes (MEMFIT.COST_MODEL), against micro-batches of a fixed number.

crowded: the Mask R-CNN of projects/Coins trains on photographs of coins. A few images among them
show a hundred photographs at once. All runs have the same plan, made for the photographs alone:
once with its number of images per micro-batch, once with its cost model. A number is halved when
memory runs out, and doubled after MEMFIT.OOM.GROW_AFTER iterations. The kernel enforces the budget,
and out-of-memory errors are counted. On Linux, on the CPU.

fits: errors of cost models in unseen dry runs, with one sum and with two.

scales: the time of an iteration with images of many sizes, as INPUT.MIN_SIZE_TRAIN makes them, on
the CPU or a GPU. All sides take turns in one run, with the same windows. The model is Detectron2's
Mask R-CNN R50-FPN with random weights.
"""

import argparse
import json
import logging
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.engine import HookBase

from d2_memfit import AccumulatingTrainer, Job, MemfitTrainer, plan_memory
from d2_memfit.config import load_cfg, with_settings
from d2_memfit.data import register_coco
from d2_memfit.iteration import CostModel, Padding
from d2_memfit.job import WorstCase
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimates import DryJob, steps
from d2_memfit.planner.search import CostFit
from d2_memfit.planner.search.cost_sums import least_squares, predicted
from d2_memfit.techniques import resize_image

from .common import CONFIG, Side, coins, machine, markdown_table, take_turns

COINS = Path(__file__).resolve().parents[2] / "projects" / "Coins" / "configs"
ZOO = (
    "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml",
    "COCO-Detection/retinanet_R_50_FPN_1x.yaml",
    "COCO-Keypoints/keypoint_rcnn_R_50_FPN_1x.yaml",
    "COCO-PanopticSegmentation/panoptic_fpn_R_50_1x.yaml",
)
SHORTEST_SIDE = 320
IMAGES_PER_WINDOW = 8
UNSEEN = (  # shares of the largest size, and objects of each image
    *((0.7, [7]), (0.7, [7] * 4), (1, [40] * 3), (0.9, [100, 100])),
    *((0.8, [200, 3]), (1, [250, 1, 1]), (0.5, [7] * 6)),
)
ONE_SUM = [0, 2, 3, 4]  # features: constant, pixels, objects, pixels x objects
PLANTED = 6  # crowded images in addition to the 64 photographs
GRID = 10  # photographs in a row and in a column of each


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("crowded", "fits", "scales"))
    parser.add_argument("--iterations", type=int, default=12, help="of the crowded run")
    parser.add_argument("--rounds", type=int, default=15, help="iterations of each side of scales")
    parser.add_argument(
        "--size", type=int, default=SHORTEST_SIDE, help="the shortest side in scales"
    )


def run(args: argparse.Namespace) -> None:
    print(f"{machine()}.\n")
    if args.only in (None, "fits"):
        print(fits(), "\n")
    if args.only in (None, "crowded") and sys.platform == "linux":
        print(crowded(args.iterations), "\n")
    if args.only in (None, "scales"):
        print(scales(args.size, args.rounds))


def fits() -> str:
    """Fit configs of the zoo for a current CUDA card, with the largest images of COCO."""
    rows = []
    for config in ZOO:
        cfg = load_cfg(config, ["MEMFIT.BUDGET_GB", 6.0, "MEMFIT.MICRO_BATCH", 2])
        job = Job.from_cfg(cfg)
        start = time.process_time()
        fit = CostFit(job, DeviceModel.load("cuda"), Padding.of(steps.build(job)[0]))
        fit.run()
        seconds, num_runs = time.process_time() - start, len(fit.runs)
        needs = np.array([r.needs for r in fit.runs])
        features = np.array([r.features for r in fit.runs])
        one = least_squares(features[:, ONE_SUM] / needs[:, None], np.ones(num_runs))
        for scale, objects in UNSEEN:
            fit.dry_run(scale, objects)
        unseen = fit.runs[num_runs:]
        ones = [np.dot(one, np.array(r.features)[ONE_SUM]) / r.needs - 1 for r in unseen]
        others = [predicted(fit.sums, r) / r.needs - 1 for r in unseen]
        spans = [f"{min(errors):+.1%} to {max(errors):+.1%}" for errors in (others, ones)]
        rows.append([config.partition("/")[2], num_runs, f"{seconds:.1f}", *spans])
    header = ["", "dry runs", "CPU seconds", "errors of the larger of two sums", "of one"]
    return markdown_table(header, rows)


def crowded(iterations: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        outcomes = train_sides(Path(folder), iterations, grow_after=(1000, 2))
    rows = [
        [name, len(o["events"]), o["retried_images"], o["micro_batches"]]
        for name, o in outcomes.items()
    ]
    header = ["", "out of memory", "images run again", "micro-batches of the last iteration"]
    return markdown_table(header, rows)


def train_sides(
    folder: Path, iterations: int, grow_after: Sequence[int] = (1000,)
) -> dict[str, dict[str, Any]]:
    """Train a plan without and with its cost model, each run in its own process.

    Args:
        grow_after: MEMFIT.OOM.GROW_AFTER of the runs without cost model.

    Returns:
        dict: the result of :func:`_train` for each side.
    """
    from make_dataset import make_dataset

    make_dataset(folder)
    plant(folder)
    settings = in_a_process(_plan, folder)
    without = {k: v for k, v in settings.items() if "COST_MODEL" not in k}
    images = settings["MEMFIT.MICRO_BATCH"]
    sides = {
        f"{images} images, GROW_AFTER {n}": {**without, "MEMFIT.OOM.GROW_AFTER": n}
        for n in grow_after
    }
    return {
        name: in_a_process(_train, folder, iterations, of_side)
        for name, of_side in {**sides, "by bytes": settings}.items()
    }


def plant(folder: Path) -> None:
    """Add images that show ``GRID x GRID`` of the photographs, with all their coins."""
    coco = json.loads((folder / "train.json").read_text())
    photographs = list(coco["images"])
    coins_of: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in photographs}
    for annotation in coco["annotations"]:
        coins_of[annotation["image_id"]].append(annotation)
    height, width = 64, 96  # of each in the grid
    for number in range(PLANTED):
        picture = np.zeros((GRID * height, GRID * width), np.uint8)
        image_id = len(coco["images"])
        for cell in range(GRID * GRID):
            photograph = photographs[(cell + number) % len(photographs)]
            top, left = cell // GRID * height, cell % GRID * width
            pixels = cv2.imread(str(folder / "train" / photograph["file_name"]), 0)
            picture[top : top + height, left : left + width] = cv2.resize(pixels, (width, height))
            scale = np.array([width / photograph["width"], height / photograph["height"]])
            for coin in coins_of[photograph["id"]]:
                polygon = np.reshape(coin["segmentation"][0], (-1, 2)) * scale + np.array(
                    [left, top]
                )
                extent = np.multiply(coin["bbox"][2:], scale)
                corner = np.multiply(coin["bbox"][:2], scale) + np.array([left, top])
                coco["annotations"].append(
                    {
                        **coin,
                        "id": len(coco["annotations"]) + 1,
                        "image_id": image_id,
                        "segmentation": [polygon.flatten().tolist()],
                        "bbox": [*corner.tolist(), *extent.tolist()],
                        "area": float(extent.prod()),
                    }
                )
        name = f"planted_{number}.png"
        cv2.imwrite(str(folder / "train" / name), picture)
        sizes = {"height": GRID * height, "width": GRID * width}
        coco["images"].append({"id": image_id, "file_name": name, **sizes})
    (folder / "planted.json").write_text(json.dumps(coco))


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in its own process, whose allocations and limits end with it."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(function, args)


def _cfg(folder: Path, dataset: str) -> CfgNode:
    register_coco(dataset, str(folder / f"{dataset}.json"), str(folder / "train"))
    opts = [
        *("MODEL.DEVICE", "cpu", "DATASETS.TRAIN", (dataset,), "DATASETS.TEST", ()),
        *("INPUT.MIN_SIZE_TRAIN", (SHORTEST_SIDE,), "INPUT.MAX_SIZE_TRAIN", 2 * SHORTEST_SIDE),
        *("MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS", [[0.5, 1.0, 2.0]]),  # as most configs have them
        *("SOLVER.IMS_PER_BATCH", 16, "SOLVER.ACCUMULATION_STEPS", 1, "SEED", 1),
        *("DATALOADER.NUM_WORKERS", 0, "MEMFIT.PLAN.MARGIN", 0.1),
    ]
    return load_cfg(str(COINS / "mask_rcnn_coins.yaml"), opts)


def _budget_gb(cfg: CfgNode, batch: Any, device: DeviceModel, images: int) -> float:
    """A budget into which ``images`` of the largest images fit at once, and not many more."""
    job = Job.from_cfg(with_settings(cfg, {"MEMFIT.MICRO_BATCH": images}), batch=batch)
    needs = DryJob(job, device, evaluates=False).total_bytes()
    return round(needs / 2**30 / (1 - cfg.MEMFIT.PLAN.MARGIN) + 0.02, 2)


def _plan(folder: Path) -> dict[str, Any]:
    """Settings of a plan for a budget into which eight of the photographs fit at once."""
    cfg = _cfg(folder, "train")
    there = DeviceModel.load("cpu")
    options: dict[str, Any] = {"device": there, "evaluates": False, "cost_model": True}
    return plan_memory(cfg, _budget_gb(cfg, None, there, 8), allow=["exact"], **options).settings


class Shapes(HookBase):
    """Records the micro-batch sizes of the last iteration."""

    def __init__(self) -> None:
        self.last = ""
        self._sizes: list[int] = []

    def before_train(self) -> None:
        self.trainer.model.register_forward_pre_hook(
            lambda _, args: self._sizes.append(len(args[0]))
        )

    def before_step(self) -> None:
        self._sizes.clear()

    def after_step(self) -> None:
        self.last = " + ".join(map(str, self._sizes))


def _train(folder: Path, iterations: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Train; return the errors, the repeated images, and the last iteration's micro-batches."""
    logging.disable(logging.INFO)
    cfg = with_settings(_cfg(folder, "planted"), settings)
    with tempfile.TemporaryDirectory() as output:
        cfg.OUTPUT_DIR, cfg.SOLVER.MAX_ITER, cfg.SOLVER.CHECKPOINT_PERIOD = output, iterations, 1000
        trainer = MemfitTrainer(cfg)
        shapes = Shapes()
        trainer.register_hooks([shapes])
        trainer.train()
        record = Path(output) / "memfit_oom.jsonl"
        events = record.read_text().splitlines() if record.exists() else []
    recovery = trainer._trainer.recovery
    return {
        "events": list(map(json.loads, events)),
        "retried_images": recovery.retried_images,
        "micro_batches": shapes.last,
    }


def scales(size: int, rounds: int) -> str:
    """Measure the ratio of the medians of the time per iteration."""
    largest = (2 * size, round(2.67 * size))
    with coins(*largest) as (dicts, mapper):
        photographs = [mapper(d) for d in dicts[:16]]
    windows = _windows(photographs, rounds + 1, IMAGES_PER_WINDOW)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cfg = load_cfg(CONFIG, ["MODEL.DEVICE", device, "SOLVER.IMS_PER_BATCH", IMAGES_PER_WINDOW])
    case = WorstCase(largest, 12)
    there = DeviceModel.choose(None, device)
    budget_gb = _budget_gb(cfg, case, there, IMAGES_PER_WINDOW // 2)
    options: dict[str, Any] = {
        "device": there,
        "batch": case,
        "evaluates": False,
        "cost_model": True,
    }
    plan = plan_memory(cfg, budget_gb, allow=["exact"], **options)
    images = plan.settings["MEMFIT.MICRO_BATCH"]
    cost_model = CostModel.from_cfg(with_settings(cfg, plan.settings))
    opts = [x for k, v in plan.settings.items() if k.startswith("MEMFIT.CHECK") for x in (k, v)]
    sides = {
        f"{images} images": Side(
            partial(AccumulatingTrainer, micro_batch_size=images), windows, opts=opts
        ),
        "by bytes": Side(partial(AccumulatingTrainer, cost_model=cost_model), windows, opts=opts),
    }
    take_turns(sides.values(), rounds)
    base = statistics.median(next(iter(sides.values())).seconds)
    rows = []
    for name, side in sides.items():
        median = statistics.median(side.seconds)
        rows.append([name, f"{median:.3f}", f"{median / base:.3f}"])
    return (
        f"{IMAGES_PER_WINDOW} images of {size} to {2 * size} pixels, within {budget_gb:.2f} GB\n\n"
        + markdown_table(["micro-batches", "s per iteration (median)", "ratio of medians"], rows)
    )


def _windows(
    photographs: Sequence[dict[str, Any]], num: int, images: int
) -> list[list[dict[str, Any]]]:
    """Windows of images at 0.5 to 1.0 of their size."""
    numbers = random.Random(0)
    windows = []
    for _ in range(num):
        window = [
            resize_image(
                numbers.choice(photographs), numbers.choice((0.5, 0.6, 0.7, 0.8, 0.9, 1.0))
            )
            for _ in range(images)
        ]
        windows.append(window)
    return windows
