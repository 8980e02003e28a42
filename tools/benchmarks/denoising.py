# Copyright (c) the d2_memfit developers.
"""Denoising queries of RT-DETRv2: memory, time and gradients, with and without a limit.

The model of projects/Transformers has random weights. One step is a forward and a backward on the
CPU. Peaks count the tensors of the step, and times are CPU seconds. Gradients are those of all
parameters. Their noise is the standard deviation over draws: of the noise of queries, and of the
objects that have them. Their bias is what remains in the mean over draws.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import torch
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from tabulate import tabulate

from d2_memfit import get_cfg
from d2_memfit.memory import TensorMeter
from d2_memfit.techniques import apply_techniques

PROJECT = Path(__file__).resolve().parents[2] / "projects" / "Transformers"
MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="r18", help="of RT-DETRv2")
    parser.add_argument("--pixels", type=int, default=640, help="height and width of images")
    parser.add_argument("--limit", type=int, default=100, help="objects with denoising queries")
    parser.add_argument("--objects", type=int, nargs="*", default=[20, 200, 500, 1000])
    parser.add_argument(
        "--batches", nargs="*", default=["250", "250,20"], help="objects of images, for gradients"
    )
    parser.add_argument("--draws", type=int, default=4, help="draws in a mean gradient")


def run(args: argparse.Namespace) -> None:
    torch.set_flush_denormal(True)  # random weights have gradients that are as slow as that
    torch.manual_seed(0)
    rows = [cost(args, num) for num in args.objects]
    names = ["objects", "plain, MiB", "bounded, MiB", "ratio", "plain, s", "bounded, s", "ratio"]
    print(tabulate(rows, names, tablefmt="github", floatfmt=".2f"), end="\n\n")
    batches = [list(map(int, batch.split(","))) for batch in args.batches]
    rows = [row for counts in batches for row in distances(args, counts)]
    names = ["objects", "gradient of losses", "noise, plain", "noise, bounded", "bias"]
    print(tabulate(rows, names, tablefmt="github", floatfmt=".4f"))


def detector(args: argparse.Namespace, limit: Optional[int]) -> Any:
    sys.path.insert(0, str(PROJECT))
    from d2_transformers import add_transformers_config

    cfg = get_cfg()
    add_transformers_config(cfg)
    cfg.MODEL.META_ARCHITECTURE, cfg.MODEL.DEVICE = "TransformersDetector", "cpu"
    cfg.MODEL.MASK_ON = False
    cfg.TRANSFORMERS.TYPE, cfg.TRANSFORMERS.SIZE = "rt_detr_v2", args.size
    cfg.TRANSFORMERS.RESOLUTION = args.pixels
    cfg.MEMFIT.CRITERION.DENOISING_QUERIES = limit
    torch.manual_seed(0)
    return apply_techniques("model", build_model(cfg), cfg)


def image(num_objects: int, pixels: int) -> dict[str, Any]:
    corner = torch.rand(num_objects, 2) * 0.9
    extent = torch.rand(num_objects, 2) * 0.08 + 0.02
    instances = Instances((pixels, pixels))
    instances.gt_boxes = Boxes(torch.cat([corner, corner + extent], 1) * pixels)
    instances.gt_classes = torch.randint(80, (num_objects,))
    return {"image": torch.randint(256, (3, pixels, pixels)).byte(), "instances": instances}


def cost(args: argparse.Namespace, num_objects: int) -> list[Any]:
    sides = [detector(args, limit) for limit in (None, args.limit)]
    batch = [image(num_objects, args.pixels)]
    peaks, seconds = [], []
    for model in sides:
        with TensorMeter() as meter:
            sum(model(batch).values()).backward()
        peaks.append(meter.peak_bytes / MIB)
    for model in sides * 2:
        start = time.process_time()
        sum(model(batch).values()).backward()
        seconds.append(time.process_time() - start)
    seconds = [min(seconds[i::2]) for i in range(2)]
    return [num_objects, *peaks, peaks[1] / peaks[0], *seconds, seconds[1] / seconds[0]]


def distances(args: argparse.Namespace, counts: list[int]) -> list[list[Any]]:
    """Noise of a draw and the bias of the limit, relative to a gradient of all objects."""
    batch = [image(num, args.pixels) for num in counts]
    sides = []
    for i, limit in enumerate((None, args.limit)):
        seeds = list(range(i * args.draws, (i + 1) * args.draws))
        sides.append(gradients(detector(args, limit), batch, seeds))
    rows = []
    for kind in sides[0][0]:
        plain, bounded = (torch.stack([draw[kind] for draw in side]) for side in sides)
        variances = [float(side.var(0).sum()) for side in (plain, bounded)]
        apart = float((bounded.mean(0) - plain.mean(0)).square().sum())
        # What is left of the distance of two means without the noise that they have.
        bias = max(apart - sum(variances) / args.draws, 0.0)
        norm = float(plain.square().sum(1).mean()) ** 0.5
        rows.append([str(counts), kind, *(v**0.5 / norm for v in (*variances, bias))])
    return rows


def gradients(model: Any, batch: list[Any], seeds: list[int]) -> list[dict[str, Any]]:
    """For each seed, the gradients of denoising losses and of all losses, as vectors."""
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    parameters = [p for p in model.parameters() if p.requires_grad]
    kinds: dict[str, Callable[[str], bool]] = {
        "boxes, denoising": lambda name: "_dn_" in name and "vfl" not in name,
        "classes, denoising": lambda name: "_dn_" in name and "vfl" in name,
        "all": lambda name: True,
    }
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        losses = model(batch)
        of_seed = {}
        for kind, takes in kinds.items():
            total = sum(loss for name, loss in losses.items() if takes(name))
            parts = torch.autograd.grad(total, parameters, allow_unused=True, retain_graph=True)
            of_seed[kind] = torch.cat([p.flatten() for p in parts if p is not None])
        found.append(of_seed)
    return found
