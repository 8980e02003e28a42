# Copyright (c) the d2_memfit developers.
"""What settings of Mask R-CNN R50-FPN change in memory and time: a table of docs/OUT_OF_MEMORY.md.

Each row is an estimate for one GPU with 2 images at a time, in which one setting differs from the
recipe.
"""

import argparse
import shlex
from pathlib import Path

from pages import markdown_table, write_section

from d2_memfit.common import GB
from d2_memfit.config.load import load_cfg
from d2_memfit.job import Job
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimate import DryJob

from .common import CONFIG

PAGE = Path(__file__).resolve().parents[2] / "docs" / "OUT_OF_MEMORY.md"
TOOL = "benchmark.py guide"
R18 = "MODEL.RESNETS.DEPTH 18 MODEL.RESNETS.RES2_OUT_CHANNELS 64"
# What is tried, the keys as a user types them, a remark, and what else changes.
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
    ("a lighter backbone", R18, "", "[the model](../projects/SmallerModels/README.md)"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(_: argparse.Namespace) -> None:
    write_section(PAGE, "tries", TOOL, tries(range(len(TRIES))))


def tries(numbers: range) -> str:
    recipe = dry_job("")
    before_gb = recipe.use().allocated_bytes / GB
    rows = []
    for number in numbers:
        name, opts, remark, changes = TRIES[number]
        e = dry_job(opts)
        has_time = "AMP" not in opts and "OFFLOAD" not in opts  # else not operations decide
        rows.append(
            [
                f"{number + 1}. {name}: `{opts}`{remark}",
                f"{e.use().allocated_bytes / GB - before_gb:+.2f}",
                f"{e.flops() / recipe.flops():.2f}" if has_time else "",
                changes,
            ]
        )
    table = markdown_table(["try", "change in GB", "operations x", "what else changes"], rows)
    return f"Training starts from {before_gb:.2f} GB.\n\n{table}"


def dry_job(opts: str) -> DryJob:
    cfg = load_cfg(CONFIG, ["SOLVER.IMS_PER_BATCH", 2, *shlex.split(opts)])
    return DryJob(Job.from_cfg(cfg), DeviceModel.load("cuda"))
