#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Write tables of docs/TECHNIQUES.md and docs/OUT_OF_MEMORY.md, and docs/knobs.png.

They show the effect of each knob on Mask R-CNN R50-FPN.

Each row is an estimate for one GPU with 2 images at a time, in which one setting differs from the
recipe. It takes about a minute on two cores.
"""

import shlex
from pathlib import Path
from typing import Any, NamedTuple, Optional

import matplotlib
from matplotlib import pyplot
from pages import write_section
from tabulate import tabulate

from d2_memfit.config import load_cfg
from d2_memfit.job import Job
from d2_memfit.model_zoo import get_config_file
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimates import DryJob, MemoryEstimate, factor_range, in_words

DOCS = Path(__file__).resolve().parents[1] / "docs"
RECIPE = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"


class Knob(NamedTuple):
    name: str
    opts: list[Any]  # config keys and values, in turn
    changes: str  # in addition to memory and time; "" is nothing
    num_instances: Optional[int] = None  # of each image, if not the default


def _images(short: int, long: int) -> list[Any]:
    return ["INPUT.MIN_SIZE_TRAIN", (short,), "INPUT.MAX_SIZE_TRAIN", long]


KNOBS = {
    "Batch": [
        Knob("1 image at a time, accumulated", ["MEMFIT.MICRO_BATCH", 1], ""),
        Knob("4 images at a time", ["SOLVER.IMS_PER_BATCH", 4], "batch, or accumulation steps"),
        Knob("8 images at a time", ["SOLVER.IMS_PER_BATCH", 8], "batch, or accumulation steps"),
        Knob("8 steps of accumulation", ["SOLVER.ACCUMULATION_STEPS", 8], "effective batch"),
    ],
    "Exact techniques": [
        Knob("checkpointing, backbone", ["MEMFIT.CHECKPOINT.MODULES", ["backbone"]], ""),
        Knob("checkpointing, heads too", ["MEMFIT.CHECKPOINT.MODULES", ["all"]], ""),
        Knob("offload, backbone", ["MEMFIT.OFFLOAD.MODULES", ["backbone"]], ""),
        Knob("matching in chunks", ["MEMFIT.MATCHING.CHUNK_SIZE", 4096], ""),
        Knob("mask head in chunks", ["MEMFIT.HEADS.CHUNK_SIZE", 32], ""),
        Knob("optimizer's for-loop", ["MEMFIT.OPTIMIZER.IMPLEMENTATION", "for-loop"], ""),
    ],
    "Precision": [
        Knob("mixed precision (AMP)", ["SOLVER.AMP.ENABLED", True], "number format"),
    ],
    "Images": [
        Knob("640 pixels", _images(640, 1066), "recipe: accuracy of small objects"),
        Knob("480 pixels", _images(480, 800), "recipe: accuracy of small objects"),
        Knob("800 pixels, no multi-scale", _images(800, 1333), "recipe: less variety, more pixels"),
        Knob("multi-scale up to 1024 pixels", _images(1024, 1706), "recipe"),
        Knob("portrait beside landscape", ["DATALOADER.ASPECT_RATIO_GROUPING", False], "padding"),
        Knob("20 instances per image", [], "the dataset", 20),
        Knob("300 instances per image", [], "the dataset", 300),
        Knob("bit masks", ["INPUT.MASK_FORMAT", "bitmask"], "borders of masks"),
    ],
    "Model": [
        Knob(
            "ResNet-18",
            ["MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64],
            "the model",
        ),
        Knob("ResNet-101", ["MODEL.RESNETS.DEPTH", 101], "the model"),
        Knob("all of the backbone trained", ["MODEL.BACKBONE.FREEZE_AT", 0], "recipe"),
        Knob("backbone frozen up to res4", ["MODEL.BACKBONE.FREEZE_AT", 4], "recipe"),
        Knob("GroupNorm in FPN", ["MODEL.FPN.NORM", "GN"], "the model"),
        Knob("no mask head", ["MODEL.MASK_ON", False], "the task"),
        Knob("mask head of 128 channels", ["MODEL.ROI_MASK_HEAD.CONV_DIM", 128], "the model"),
    ],
    "Proposals": [
        Knob("256 in the ROI batch", ["MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 256], "recipe"),
        Knob("128 in the ROI batch", ["MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 128], "recipe"),
        Knob("500 after NMS", ["MODEL.RPN.POST_NMS_TOPK_TRAIN", 500], "recipe"),
        Knob("128 anchors in RPN's loss", ["MODEL.RPN.BATCH_SIZE_PER_IMAGE", 128], "recipe"),
    ],
}
# Rows of OUT_OF_MEMORY.md: words, config keys as a user types them, words about them, and changes.
TRIES = [
    (
        "gradient accumulation",
        "MEMFIT.MICRO_BATCH 1",
        ", one image at a time, same effective batch",
        "nothing",
    ),
    ("activation checkpointing", "MEMFIT.CHECKPOINT.MODULES \"['all']\"", "", "nothing"),
    ("offload", "MEMFIT.OFFLOAD.MODULES \"['*']\"", "", "nothing; takes RAM"),
    ("mask head in chunks", "MEMFIT.HEADS.CHUNK_SIZE 32", "", "nothing"),
    ("mixed precision", "SOLVER.AMP.ENABLED True", "", "number format"),
    ("smaller images", 'INPUT.MIN_SIZE_TRAIN "(640,)"', "", "accuracy of small objects"),
    ("fewer sampled boxes", "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 256", "", "recipe"),
    (
        "a lighter backbone",
        "MODEL.RESNETS.DEPTH 18 MODEL.RESNETS.RES2_OUT_CHANNELS 64",
        "",
        "[the model](../projects/SmallerModels/README.md#light-backbones)",
    ),
]
WORKERS = (0, 2, 4, 8)
LESS, MORE = "#0072B2", "#E69F00"  # Okabe and Ito: colour-blind people can tell them apart

TEXT = """The allocator and the context add {overhead:.1f} GB to the recipe's peak.

{device}

Approximate RAM of one rank with the recipe's loader, without the dataset's annotations:

{host}
"""


def estimate(opts: list[Any], num_instances: Optional[int] = None) -> MemoryEstimate:
    cfg = load_cfg(get_config_file(RECIPE), ["SOLVER.IMS_PER_BATCH", 2, *opts])
    job = Job.from_cfg(cfg, 1, num_instances=num_instances)
    return DryJob(job, DeviceModel.load("cuda")).estimate()


def seconds_per_image(e: MemoryEstimate) -> float:
    return e.seconds_per_iteration / (e.images_per_gpu * e.accumulation_steps)


def gigabytes(e: MemoryEstimate, recipe: MemoryEstimate) -> list[str]:
    difference = e.peak_allocated_gb - recipe.peak_allocated_gb
    training = f"{e.peak_allocated_gb:.2f} ({difference:+.2f})"
    return [training, f"{e.evaluation_gb:.2f}"]


def tries(recipe: MemoryEstimate) -> str:
    """The table of OUT_OF_MEMORY.md."""
    rows = []
    for number, (words, opts, more, changes) in enumerate(TRIES, 1):
        e = estimate(shlex.split(opts))
        factor = seconds_per_image(e) / seconds_per_image(recipe)
        time = in_words(factor_range(factor, "SOLVER.AMP.ENABLED" in opts))
        gb = f"{e.peak_allocated_gb - recipe.peak_allocated_gb:+.2f}"
        rows.append([f"{number}. {words}: `{opts}`{more}", gb, time, changes])
    lines = [["try", "change in GB", "time x", "what else changes"], ["---"] * 4, *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"Training starts from {recipe.peak_allocated_gb:.2f} GB.\n\n{table}"


def draw(recipe: MemoryEstimate, rows: list[tuple[Knob, MemoryEstimate]], path: Path) -> None:
    matplotlib.use("Agg")
    figure, axes = pyplot.subplots(figsize=(9, 0.24 * len(rows) + 1), layout="constrained")
    names = [knob.name for knob, _ in rows]
    sizes = [e.peak_allocated_gb for _, e in rows]
    less = [size <= recipe.peak_allocated_gb for size in sizes]
    bars = axes.barh(names, sizes, color=[LESS if x else MORE for x in less])
    for bar, is_less in zip(bars, less):
        bar.set_hatch("" if is_less else "//")
    axes.axvline(recipe.peak_allocated_gb, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel(
        "GB at the peak of training, estimated\n"
        "The line is the recipe, 2 images at a time; what needs more is hatched"
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    recipe = estimate([])
    lines = [["**recipe**", *gigabytes(recipe, recipe), "1.00", ""]]
    rows = []
    for group, knobs in KNOBS.items():
        lines.append([f"**{group}**", "", "", "", ""])
        for knob in knobs:
            e = estimate(knob.opts, knob.num_instances)
            rows.append((knob, e))
            factor = seconds_per_image(e) / seconds_per_image(recipe)
            time = in_words(factor_range(factor, "SOLVER.AMP.ENABLED" in knob.opts))
            changes = knob.changes or "nothing"
            lines.append([knob.name, *gigabytes(e, recipe), time, changes])
    draw(recipe, rows, DOCS / "knobs.png")
    header = ["", "training, GB", "evaluation, GB", "time x", "changes"]
    device = tabulate(lines, header, tablefmt="pipe", disable_numparse=True)
    host = [[n, f"{estimate(['DATALOADER.NUM_WORKERS', n]).host_gb:.1f}"] for n in WORKERS]
    text = TEXT.format(
        overhead=recipe.device_total_gb - recipe.peak_allocated_gb,
        device=device,
        host=tabulate(host, ["workers", "GB"], tablefmt="pipe"),
    )
    write_section(DOCS / "TECHNIQUES.md", "knobs", "make_knobs.py", text)
    write_section(DOCS / "OUT_OF_MEMORY.md", "tries", "make_knobs.py", tries(recipe))


if __name__ == "__main__":
    main()
