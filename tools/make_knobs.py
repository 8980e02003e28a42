#!/usr/bin/env python3
"""Write docs/KNOBS.md and docs/knobs.png: what each knob does to the memory of Mask R-CNN R50-FPN.

Each row is an estimate of one GPU with 2 images at a time, in which one thing is other than in the
recipe; or a benchmark's figure, where no estimate can say it.
"""

from pathlib import Path

import matplotlib
from tabulate import tabulate

from d2_memfit.config import load_cfg
from d2_memfit.model_zoo import get_config_file
from d2_memfit.planner import WorstCase, worst_case
from d2_memfit.planner.device_model import DeviceModel
from d2_memfit.planner.estimate import DryJob
from d2_memfit.techniques import get_technique

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

DOCS = Path(__file__).resolve().parents[1] / "docs"
BASE = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x.yaml"
TWO_IMAGES = ["SOLVER.IMS_PER_BATCH", 2]

# What a knob is called, its settings, and what else changes.
KNOBS = (
    ("1 image at a time", ["MEMFIT.MICRO_BATCH", 1], "nothing: gradients are accumulated"),
    ("4 images at a time", ["SOLVER.IMS_PER_BATCH", 4], "nothing, at the same effective batch"),
    ("mixed precision", ["SOLVER.AMP.ENABLED", True], "number formats"),
    ("checkpointing, backbone", ["MEMFIT.CHECKPOINT.MODULES", ["backbone"]], "nothing"),
    ("checkpointing, all", ["MEMFIT.CHECKPOINT.MODULES", ["backbone+heads"]], "nothing"),
    ("mask head in chunks", ["MEMFIT.HEADS.CHUNK_SIZE", 32], "nothing"),
    ("matching in chunks", ["MEMFIT.MATCHING.CHUNK_SIZE", 4096], "nothing"),
    ("offload, backbone", ["MEMFIT.OFFLOAD.MODULES", ["backbone"]], "nothing; host RAM"),
    ("images of 640 pixels", ["INPUT.MIN_SIZE_TRAIN", (640,), "INPUT.MAX_SIZE_TRAIN", 1066], "recipe"),
    ("images of 480 pixels", ["INPUT.MIN_SIZE_TRAIN", (480,), "INPUT.MAX_SIZE_TRAIN", 800], "recipe"),
    ("no multi-scale, 800 pixels", ["INPUT.MIN_SIZE_TRAIN", (800,)], "less augmentation"),
    ("both orientations in a batch", ["DATALOADER.ASPECT_RATIO_GROUPING", False], "padding"),
    ("ResNet-18", ["MODEL.RESNETS.DEPTH", 18, "MODEL.RESNETS.RES2_OUT_CHANNELS", 64], "the model"),
    ("ResNet-101", ["MODEL.RESNETS.DEPTH", 101], "the model"),
    ("all of the backbone trained", ["MODEL.BACKBONE.FREEZE_AT", 0], "the recipe"),
    ("3 stages frozen", ["MODEL.BACKBONE.FREEZE_AT", 4], "the recipe"),
    ("256 sampled proposals", ["MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 256], "the sampling"),
    ("128 sampled proposals", ["MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 128], "the sampling"),
    ("500 proposals", ["MODEL.RPN.POST_NMS_TOPK_TRAIN", 500], "the choice of proposals"),
    ("no mask head", ["MODEL.MASK_ON", False], "the task"),
    ("bit masks", ["INPUT.MASK_FORMAT", "bitmask"], "borders of masks"),
    ("GroupNorm in FPN", ["MODEL.FPN.NORM", "GN"], "the model"),
    ("20 instances per image", [], "the images"),
    ("300 instances per image", [], "the images"),
    ("foreach off", ["MEMFIT.OPTIMIZER.IMPLEMENTATION", "for-loop"], "nothing"),
)
INSTANCES = {"20 instances per image": 20, "300 instances per image": 300}
