# Copyright (c) the d2_memfit developers.
"""Savings of chunks of objects, and of masks one at a time, in models with queries.

The model is a DETR with masks and random predictions (detr_like.py). Its matcher, criterion and
inference are as in DETR and Mask2Former. Peaks are counted byte by byte over all tensors, without
predictions and model. NumPy arrays, and SciPy's input, do not count. Losses are those of two
decoder layers, forward and backward.

The evaluation is that of one image, up to the run-length codes of its masks. Without the technique
it is a dry run: at the default size its masks would take more memory than most machines have.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.modeling import build_model

from d2_memfit.config import load_cfg
from d2_memfit.measure.scale import MASK_RCNN, TINY_MODEL
from d2_memfit.memory import TensorMeter
from d2_memfit.planner.dry_run import DryRun
from d2_memfit.techniques import get_technique, ready_to_evaluate

from .common import machine, markdown_table
from .detr_like import (
    HungarianMatcher,
    SetCriterion,
    add_detr_config,
    random_outputs,
    random_targets,
)

MB = 2**20
NUM_QUERIES = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--objects", type=int, default=2000, help="in the batch")
    parser.add_argument("--mask-size", type=int, default=256, help="of objects, in pixels")
    parser.add_argument("--chunk-size", type=int, default=32, help="MEMFIT.CRITERION.CHUNK_SIZE")
    parser.add_argument("--size", type=int, nargs=2, default=[4000, 5000], help="height, width")
    parser.add_argument("--masks", type=int, default=100, help="of the image that is evaluated")


def run(args: argparse.Namespace) -> None:
    num, chunk_size = args.objects, args.chunk_size
    masks = f"and masks of {args.mask_size} x {args.mask_size}"
    criteria: list[tuple[str, list[str], list[int], int]] = [
        ("matching and boxes, 1 image", ["boxes"], [num], 1),
        ("matching and boxes, 16 images", ["boxes"], [num // 16] * 16, 1),
        (f"{masks}, all pixels", ["boxes", "masks"], [num], args.mask_size),
        (f"{masks}, 12,544 random points", ["boxes", "points"], [num], args.mask_size),
    ]
    rows = []
    for name, losses, counts, size in criteria:
        plain, chunked = (losses_of(losses, counts, size, c) for c in (None, chunk_size))
        peaks = [f"{peak / MB:.1f}" for peak, _ in (plain, chunked)]
        seconds = [f"{seconds:.2f}" for _, seconds in (plain, chunked)]
        rows.append([name, *peaks, f"{plain[0] / chunked[0]:.0f}", *seconds])
    print(f"{machine()}\n")
    chunks = f"chunks of {chunk_size}, MiB"
    header = ["losses", "plain, MiB", chunks, "ratio", "plain, s", "chunks, s"]
    print(markdown_table(header, rows))
    plain_bytes = evaluation_planned(args.size, args.masks)
    peak_bytes, evaluation_s = evaluation(args.size, args.masks)
    row = [
        f"{args.masks} masks of {args.size[0]} x {args.size[1]} pixels",
        *(f"{size / MB:.0f}" for size in (plain_bytes, peak_bytes)),
        *(f"{figure:.0f}" for figure in (plain_bytes / peak_bytes, evaluation_s)),
    ]
    header = ["evaluation", "plain, MiB", "one at a time, MiB", "ratio", "s"]
    print(f"\n{markdown_table(header, [row])}")


def losses_of(
    losses: list[str], counts: Sequence[int], size: int, chunk_size: Any
) -> tuple[int, float]:
    """Measure the losses' peak in bytes, and their seconds."""
    num_points = 12544 * ("points" in losses)
    criterion: torch.nn.Module = SetCriterion(HungarianMatcher(num_points), losses, num_points)
    outputs = random_outputs(len(counts), NUM_QUERIES, size=64 if size > 1 else 1)
    targets = random_targets(counts, size)
    if chunk_size:
        cfg = load_cfg(MASK_RCNN)
        cfg.MEMFIT.CRITERION.CHUNK_SIZE = chunk_size
        criterion = get_technique("ChunkedCriterion").apply(criterion, cfg)
        criterion(outputs, targets)  # tries chunks, once
    start = time.perf_counter()
    with TensorMeter() as meter:
        sum(criterion(outputs, targets).values()).backward()
    return meter.peak_bytes, time.perf_counter() - start


def evaluation(size: Sequence[int], num_masks: int) -> tuple[int, float]:
    """Measure peak in bytes and seconds, with masks one at a time."""
    cfg, batch = _image(size, num_masks)
    cfg.MEMFIT.EVALUATION.ON_HOST = True
    model = build_model(cfg).eval()
    start = time.perf_counter()
    with torch.no_grad(), ready_to_evaluate(model, cfg, announce=False), TensorMeter() as meter:
        (result,) = model(batch)
        instances_to_coco_json(result["instances"].to("cpu"), 1)
    return meter.peak_bytes, time.perf_counter() - start


def evaluation_planned(size: Sequence[int], num_masks: int) -> int:
    """Peak, in bytes, of a dry run without the technique."""
    cfg, batch = _image(size, num_masks)
    model = build_model(cfg).eval()
    with torch.no_grad(), DryRun(model) as dry_run:
        before = dry_run.live_bytes
        model(batch)
    return dry_run.peak_bytes - before


def _image(size: Sequence[int], num_masks: int) -> tuple[CfgNode, list[dict[str, Any]]]:
    cfg = load_cfg(MASK_RCNN, [*TINY_MODEL, "MODEL.DEVICE", "cpu", "MODEL.WEIGHTS", ""])
    add_detr_config(cfg)
    cfg.MODEL.META_ARCHITECTURE = "SmallDetr"
    cfg.MODEL.DETR.NUM_OBJECT_QUERIES = cfg.TEST.DETECTIONS_PER_IMAGE = num_masks
    cfg.MODEL.DETR.PANOPTIC = False
    pixels = torch.randint(0, 256, (3, 800, 800), dtype=torch.uint8)
    return cfg, [{"image": pixels, "height": size[0], "width": size[1]}]
