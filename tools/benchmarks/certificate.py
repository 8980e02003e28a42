# Copyright (c) the d2_memfit developers.
"""Certified windows against what they really need, under a limit that the kernel enforces.

A small proposal network trains on photographs of coins, of which some show 16 at once. A first run
within a wide budget tells what the process takes. Then windows are cut by a cost model, and
certified. RLIMIT_DATA enforces the budget, and each rank reads the peak of its private memory in
each window. The run ends half-way, and is resumed. The other side has as many images in each
micro-batch as fit on average, for 150 windows at most.

Linux only, on the CPU.
"""

import argparse
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.engine import HookBase

from d2_memfit import Job, MemfitTrainer, compat
from d2_memfit.certificate import Certificate, certify, follow
from d2_memfit.common.units import GB
from d2_memfit.config import load_cfg, with_settings
from d2_memfit.data import register_coco
from d2_memfit.engine import launch
from d2_memfit.iteration import MicroBatchShape, Padding
from d2_memfit.memory import process_memory
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimates import DryJob, as_in_runs, steps
from d2_memfit.planner.search import CostFit
from d2_memfit.settings import Settings

from .common import machine, markdown_table

IMAGES = 160
GRIDS = (1, 1, 1, 2, 3, 4)  # photographs in each row and column of an image
LEARNED_FROM = 1000  # windows; a shorter run may have seen small ones only
PLAIN = 150  # windows at most that are cut without bytes
MARGIN = 0.03  # of the budget; small, so that cuts that are wrong fail


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--windows", type=int, default=3000, help="of each rank")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--images", type=int, default=4, help="in a window of a rank")


def run(args: argparse.Namespace) -> None:
    print(f"{machine()}.\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        crowd(folder)
        os.environ["D2_MEMFIT_CACHE"] = name  # a short run tells what the process takes
        in_a_process(_start, args.ranks, _learn, folder, args.ranks)
        seconds = in_a_process(_certify, folder, args.ranks, args.windows, args.images)
        print(f"certified {args.windows} windows of {args.ranks} ranks in {seconds:.1f} CPU s\n")
        rows = []
        for side, windows in (("certified", args.windows), ("fixed", min(args.windows, PLAIN))):
            for is_resumed in (False, True):
                in_a_process(_start, args.ranks, _train, folder, windows, side, is_resumed)
            rows.append(row_of(folder, side, args.ranks, windows))
    print(markdown_table(["", "windows", "out of memory", *PREDICTED], rows))


PREDICTED = (
    "certified / measured: least",
    "median",
    "99.9%",
    "windows above it",
    "above it and the margin",
)


def row_of(folder: Path, side: str, ranks: int, windows: int) -> list[Any]:
    """What a run measured in its windows, against its certificate."""
    certificate = Certificate.read(folder / "certificate.pt")
    needs = certificate.needs_bytes.numpy()
    measured = np.zeros((windows, ranks))
    errors = 0
    for line in (folder / f"{side}.jsonl").read_text().splitlines():
        record = json.loads(line)
        measured[record["iteration"], record["rank"]] = record["bytes"]
        errors += record["errors"]
    assert (measured > 0).all()
    if side == "fixed":
        return [side, measured.size, errors, *[""] * len(PREDICTED)]
    margin = certificate.budget_gb * GB - certificate.limit_bytes
    ratios = np.quantile(needs / measured, (0, 0.5, 0.999))
    above = [int((measured > needs + more).sum()) for more in (0, margin)]
    return [side, measured.size, errors, *(f"{r:.3f}" for r in ratios), *above]


def crowd(folder: Path) -> None:
    """Make images that show photographs of coins, one or many in rows and columns."""
    from make_dataset import make_dataset

    make_dataset(folder)
    coco = json.loads((folder / "train.json").read_text())
    random = np.random.default_rng(0)
    coins_of: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in coco["images"]}
    for annotation in coco["annotations"]:
        coins_of[annotation["image_id"]].append(annotation)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(IMAGES):
        grid = int(random.choice(GRIDS)) if number else max(GRIDS)
        width, height = (int(x) for x in random.permutation((240, 180)))
        cell = width // grid, height // grid
        picture = np.zeros((height, width), np.uint8)
        for place in range(grid * grid):
            left, top = place % grid * cell[0], place // grid * cell[1]
            photograph = coco["images"][int(random.integers(len(coco["images"])))]
            pixels = cv2.imread(str(folder / "train" / photograph["file_name"]), 0)
            picture[top : top + cell[1], left : left + cell[0]] = cv2.resize(pixels, cell)
            scale = np.array([cell[0] / photograph["width"], cell[1] / photograph["height"]])
            for coin in coins_of[photograph["id"]]:
                corner = np.multiply(coin["bbox"][:2], scale) + np.array([left, top])
                box = [*corner.tolist(), *np.multiply(coin["bbox"][2:], scale).tolist()]
                row = {"id": len(annotations) + 1, "image_id": number, "bbox": box, "iscrowd": 0}
                annotations.append({**row, "category_id": 1, "area": box[2] * box[3]})
        cv2.imwrite(str(folder / f"{number}.png"), picture)
        size = {"height": height, "width": width}
        images.append({"id": number, "file_name": f"{number}.png", **size})
    crowded = {**coco, "images": images, "annotations": annotations}
    (folder / "crowded.json").write_text(json.dumps(crowded))


def register(folder: Path) -> None:
    register_coco("crowded", str(folder / "crowded.json"), str(folder))


def cfg_of(folder: Path, ranks: int, windows: int, images: int = 4) -> CfgNode:
    register(folder)
    cfg = load_cfg("COCO-Detection/rpn_R_50_C4_1x")
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("crowded",), ()
    cfg.DATALOADER.NUM_WORKERS = 1
    cfg.INPUT.MIN_SIZE_TRAIN = (64, 96, 128, 256)
    cfg.INPUT.MAX_SIZE_TRAIN = 384
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.WEIGHTS = ""
    cfg.MODEL.PIXEL_STD = [300.0, 300.0, 300.0]  # keeps activations of random weights small
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res2"]
    cfg.MODEL.RESNETS.STEM_OUT_CHANNELS = 8
    cfg.MODEL.RESNETS.WIDTH_PER_GROUP = 4
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 16
    cfg.MODEL.RPN.IN_FEATURES = ["res2"]
    cfg.MODEL.RPN.PRE_NMS_TOPK_TRAIN = 50
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[8.0, 16.0, 32.0, 64.0, 128.0]]
    cfg.SOLVER.IMS_PER_BATCH = images * ranks
    cfg.SOLVER.BASE_LR = 1e-4
    cfg.SOLVER.MAX_ITER = windows
    cfg.SOLVER.STEPS = ()
    cfg.SOLVER.CHECKPOINT_PERIOD = windows // 2
    cfg.SEED = 1
    cfg.MEMFIT.OOM.POLICY = "split"
    cfg.MEMFIT.PLAN.MARGIN = MARGIN
    return cfg


def _learn(folder: Path, ranks: int) -> None:
    """Train within a wide budget, one image at a time."""
    torch.set_num_threads(1)
    cfg = cfg_of(folder, ranks, LEARNED_FROM)
    cfg.MEMFIT.MICRO_BATCH = 1
    cfg.MEMFIT.BUDGET_GB = 4.0
    cfg.OUTPUT_DIR = str(folder / "learned")
    Trainer(cfg).train()


def _certify(folder: Path, ranks: int, windows: int, images: int) -> float:
    """Plan with a cost model, and certify; the CPU seconds of the latter."""
    cfg = cfg_of(folder, ranks, windows, images)
    job = Job.from_cfg(with_settings(cfg, {"MEMFIT.MICRO_BATCH": 1}), ranks)
    there = as_in_runs(job, DeviceModel.load("cpu"), under_budget=True)
    print(f"{there.from_run}\n")
    needs_gb = DryJob(job, there, evaluates=False).total_bytes() / GB
    budget_gb = round((needs_gb + 0.02) / (1 - MARGIN), 2)
    fit = CostFit(job, there, Padding.from_model(steps.build(job)[0]))
    planned = with_settings(cfg, {"MEMFIT.BUDGET_GB": budget_gb, **fit.settings()})
    cost_model = Settings.from_cfg(planned, ranks).cost_model
    assert cost_model is not None
    start = time.process_time()
    certificate = certify(Job.from_cfg(planned, ranks), device="cpu")
    seconds = time.process_time() - start
    certificate.write(folder / "certificate.pt")
    print(f"{certificate}\n")
    dicts = json.loads((folder / "crowded.json").read_text())
    mean = len(dicts["annotations"]) // len(dicts["images"])
    fixed = 1
    while fixed < images:
        more = MicroBatchShape.from_images(
            np.array([(136, 181, mean)] * (fixed + 1))
        )  # the mean of sizes
        if cost_model.bytes_of(more, Padding(32)) > cost_model.limit_bytes:
            break
        fixed += 1
    print(f"Fixed micro-batches: {fixed} images\n")
    (folder / "certified.yaml").write_text(planned.dump())
    keys = {
        "MEMFIT.COST_MODEL.BYTES": [],
        "MEMFIT.MICRO_BATCH": fixed,
        "SOLVER.CHECKPOINT_PERIOD": min(windows, PLAIN) // 2,
    }
    (folder / "fixed.yaml").write_text(with_settings(planned, keys).dump())
    return seconds


class PeakOfWindow(HookBase):
    """Records the peak of a rank's private memory in each window, and its errors."""

    def __init__(self, folder: Path, side: str, inner: Any) -> None:
        self._file = (folder / f"{side}.jsonl").open("a")
        self._inner = inner
        self._before = process_memory()
        self._errors = 0
        inner.out_of_memory_observers.append(self._note_error)

    def _note_error(self) -> None:
        self._errors += 1

    def before_step(self) -> None:
        self._errors = 0
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = process_memory()

    def after_step(self) -> None:
        grown = process_memory().peak_resident_bytes - self._before.resident_bytes
        record = {
            "iteration": self.trainer.iter,
            "rank": torch.distributed.get_rank() if torch.distributed.is_initialized() else 0,
            "bytes": self._before.data_bytes + grown,
            "errors": self._errors,
        }
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


class Trainer(MemfitTrainer):
    def build_writers(self) -> list[Any]:
        return []


def _start(ranks: int, function: Callable[..., None], *args: Any) -> None:
    launch(function, ranks, dist_url="auto", args=args)


def _train(folder: Path, windows: int, side: str, is_resumed: bool) -> None:
    """Train half of the windows."""
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    register(folder)
    cfg = load_cfg(str(folder / f"{side}.yaml"))
    cfg.OUTPUT_DIR = str(folder / side)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=is_resumed)
    inner = compat.inner_trainer(trainer)
    if side == "certified":
        follow(trainer, folder / "certificate.pt", trainer.start_iter)
    trainer.register_hooks([PeakOfWindow(folder, side, inner)])
    trainer.max_iter = windows if is_resumed else windows // 2
    trainer.train()


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function in its own process, whose allocations and limits end with it."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, *args).result()


assert sys.platform == "linux", __doc__
