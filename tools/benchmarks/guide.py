# Copyright (c) the d2_memfit developers.
"""What settings of Mask R-CNN R50-FPN change in memory and time, from estimates.

Each row is an estimate for one GPU with 2 images at a time, in which one setting differs from the
recipe. The rows are tables of docs/TECHNIQUES.md and docs/OUT_OF_MEMORY.md.
"""

import shlex
from pathlib import Path
from typing import NamedTuple, Optional

from pages import write_section

from d2_memfit.common.units import GB
from d2_memfit.config.load import load_cfg
from d2_memfit.config.model_zoo import get_config_file
from d2_memfit.job import Job
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.estimate import DryJob

from .common import CONFIG, markdown_table

DOCS = Path(__file__).resolve().parents[2] / "docs"
TOOL = "benchmark.py techniques"


class Knob(NamedTuple):
    """A setting.

    Attributes:
        opts: config keys and values, as a user types them.
        changes: what else changes, in addition to memory and time.
        num_instances: of each image, if not the default.
        remark: words after the keys.
    """

    name: str
    opts: str
    changes: str = "nothing"
    num_instances: Optional[int] = None
    remark: str = ""


def images(short: int, long: int) -> str:
    return f"INPUT.MIN_SIZE_TRAIN ({short},) INPUT.MAX_SIZE_TRAIN {long}"


R18 = "MODEL.RESNETS.DEPTH 18 MODEL.RESNETS.RES2_OUT_CHANNELS 64"

KNOBS = {
    "Batch": [
        Knob("1 image at a time, accumulated", "MEMFIT.MICRO_BATCH 1"),
        Knob("4 images at a time", "SOLVER.IMS_PER_BATCH 4", "batch, or accumulation steps"),
        Knob("8 images at a time", "SOLVER.IMS_PER_BATCH 8", "batch, or accumulation steps"),
        Knob("8 steps of accumulation", "SOLVER.ACCUMULATION_STEPS 8", "effective batch"),
    ],
    "Exact techniques": [
        Knob("checkpointing, backbone", "MEMFIT.CHECKPOINT.MODULES \"['backbone']\""),
        Knob("checkpointing, heads too", "MEMFIT.CHECKPOINT.MODULES \"['all']\""),
        Knob("offload, backbone", "MEMFIT.OFFLOAD.MODULES \"['backbone']\""),
        Knob("matching in chunks", "MEMFIT.MATCHING.CHUNK_SIZE 4096"),
        Knob("mask head in chunks", "MEMFIT.HEADS.CHUNK_SIZE 32"),
    ],
    "Precision": [
        Knob("mixed precision (AMP)", "SOLVER.AMP.ENABLED True", "number format"),
    ],
    "Images": [
        Knob("640 pixels", images(640, 1066), "recipe: accuracy of small objects"),
        Knob("480 pixels", images(480, 800), "recipe: accuracy of small objects"),
        Knob("800 pixels, no multi-scale", images(800, 1333), "recipe: less variety, more pixels"),
        Knob("multi-scale up to 1024 pixels", images(1024, 1706), "recipe"),
        Knob("portrait beside landscape", "DATALOADER.ASPECT_RATIO_GROUPING False", "padding"),
        Knob("20 instances per image", "", "the dataset", 20),
        Knob("300 instances per image", "", "the dataset", 300),
        Knob("bit masks", "INPUT.MASK_FORMAT bitmask", "borders of masks"),
    ],
    "Model": [
        Knob("ResNet-18", R18, "the model"),
        Knob("ResNet-101", "MODEL.RESNETS.DEPTH 101", "the model"),
        Knob("all of the backbone trained", "MODEL.BACKBONE.FREEZE_AT 0", "recipe"),
        Knob("backbone frozen up to res4", "MODEL.BACKBONE.FREEZE_AT 4", "recipe"),
        Knob("GroupNorm in FPN", "MODEL.FPN.NORM GN", "the model"),
        Knob("no mask head", "MODEL.MASK_ON False", "the task"),
        Knob("mask head of 128 channels", "MODEL.ROI_MASK_HEAD.CONV_DIM 128", "the model"),
    ],
    "Proposals": [
        Knob("256 in the ROI batch", "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 256", "recipe"),
        Knob("128 in the ROI batch", "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 128", "recipe"),
        Knob("500 after NMS", "MODEL.RPN.POST_NMS_TOPK_TRAIN 500", "recipe"),
        Knob("128 anchors in RPN's loss", "MODEL.RPN.BATCH_SIZE_PER_IMAGE 128", "recipe"),
    ],
}
TRIES = [
    Knob(
        "gradient accumulation",
        "MEMFIT.MICRO_BATCH 1",
        remark=", one image at a time, same effective batch",
    ),
    Knob("activation checkpointing", "MEMFIT.CHECKPOINT.MODULES \"['all']\""),
    Knob("offload", "MEMFIT.OFFLOAD.MODULES \"['*']\"", "nothing; takes RAM"),
    Knob("mask head in chunks", "MEMFIT.HEADS.CHUNK_SIZE 32"),
    Knob("mixed precision", "SOLVER.AMP.ENABLED True", "number format"),
    Knob("smaller images", 'INPUT.MIN_SIZE_TRAIN "(640,)"', "accuracy of small objects"),
    Knob("fewer sampled boxes", "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 256", "recipe"),
    Knob("a lighter backbone", R18, "[the model](../projects/SmallerModels/README.md)"),
]
WORKERS = (0, 2, 4, 8)


def write() -> None:
    recipe = dry_job(Knob("recipe", ""))
    write_section(DOCS / "TECHNIQUES.md", "knobs", TOOL, knobs(recipe))
    write_section(DOCS / "OUT_OF_MEMORY.md", "tries", TOOL, tries(recipe))


def knobs(recipe: DryJob) -> str:
    """The tables of TECHNIQUES.md."""
    rows = [["**recipe**", *gigabytes(recipe, recipe), "1.00", ""]]
    for group, of_group in KNOBS.items():
        rows.append([f"**{group}**", "", "", "", ""])
        for knob in of_group:
            e = dry_job(knob)
            rows.append([knob.name, *gigabytes(e, recipe), factor(knob, e, recipe), knob.changes])
    host = [
        [n, f"{dry_job(Knob('', f'DATALOADER.NUM_WORKERS {n}')).host_bytes / GB:.1f}"]
        for n in WORKERS
    ]
    overhead = (recipe.total_bytes() - recipe.use().allocated_bytes) / GB
    header = ["", "training, GB", "evaluation, GB", "operations x", "changes"]
    return "\n\n".join(
        [
            f"The allocator and the context add {overhead:.1f} GB to the recipe's peak.",
            markdown_table(header, rows),
            "Approximate RAM of one rank with the recipe's loader, without the dataset's "
            "annotations:",
            markdown_table(["workers", "GB"], host),
        ]
    )


def tries(recipe: DryJob) -> str:
    """The table of OUT_OF_MEMORY.md."""
    rows = []
    for number, knob in enumerate(TRIES, 1):
        e = dry_job(knob)
        gb = f"{(e.use().allocated_bytes - recipe.use().allocated_bytes) / GB:+.2f}"
        name = f"{number}. {knob.name}: `{knob.opts}`{knob.remark}"
        rows.append([name, gb, factor(knob, e, recipe), knob.changes])
    table = markdown_table(["try", "change in GB", "operations x", "what else changes"], rows)
    return f"Training starts from {recipe.use().allocated_bytes / GB:.2f} GB.\n\n{table}"


def dry_job(knob: Knob) -> DryJob:
    opts = ["SOLVER.IMS_PER_BATCH", 2, *shlex.split(knob.opts)]
    job = Job.from_cfg(load_cfg(get_config_file(CONFIG), opts), num_instances=knob.num_instances)
    return DryJob(job, DeviceModel.load("cuda"))


def gigabytes(e: DryJob, recipe: DryJob) -> list[str]:
    (training, evaluation), (before, _) = (
        [u.allocated_bytes / GB for u in x.uses()] for x in (e, recipe)
    )
    return [f"{training:.2f} ({training - before:+.2f})", f"{evaluation:.2f}"]


def factor(knob: Knob, e: DryJob, recipe: DryJob) -> str:
    """Operations of an image over those of the recipe; "" if others decide about its time."""
    if "AMP" in knob.opts or "OFFLOAD" in knob.opts:
        return ""
    return f"{e.flops() / recipe.flops():.2f}"
