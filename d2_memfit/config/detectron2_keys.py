# Copyright (c) the d2_memfit developers.
"""Checks of Detectron2's own keys, for values that fail late or without naming the key.

What the construction of the model refuses is not here.
"""

import math

from detectron2.config import CfgNode
from PIL import Image

from ..common.checks import check_choice, check_int, check_positive_number, fits, value_of
from ..data import shorter_sides
from ..errors import ConfigError

__all__ = ["check_detectron2_keys"]

# The smallest value of an integer.
_AT_LEAST = {
    "MODEL.RPN.BATCH_SIZE_PER_IMAGE": 1,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 1,
    "MODEL.ROI_HEADS.NUM_CLASSES": 1,
    "MODEL.RETINANET.NUM_CLASSES": 1,
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 1,
    "MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION": 1,
    "MODEL.ROI_KEYPOINT_HEAD.POOLER_RESOLUTION": 1,
    "DATALOADER.NUM_WORKERS": 0,
    "INPUT.MAX_SIZE_TRAIN": 1,
    "INPUT.MAX_SIZE_TEST": 1,
    "SOLVER.CHECKPOINT_PERIOD": 1,
    "SOLVER.WARMUP_ITERS": 0,
    "TEST.EVAL_PERIOD": 0,
    "VIS_PERIOD": 0,
}
_CHOICES = {
    "DATALOADER.SAMPLER_TRAIN": (
        "TrainingSampler",
        "RepeatFactorTrainingSampler",
        "RandomSubsetTrainingSampler",
    ),
    "INPUT.FORMAT": (*Image.MODES, "BGR", "YUV-BT.601"),
    "INPUT.MASK_FORMAT": ("polygon", "bitmask"),
    "INPUT.RANDOM_FLIP": ("none", "horizontal", "vertical"),
    "INPUT.MIN_SIZE_TRAIN_SAMPLING": ("choice", "range"),
    "INPUT.CROP.TYPE": ("relative_range", "relative", "absolute", "absolute_range"),
    "SOLVER.LR_SCHEDULER_NAME": (
        "WarmupMultiStepLR",
        "WarmupCosineLR",
        "WarmupStepWithFixedGammaLR",
    ),
    "SOLVER.CLIP_GRADIENTS.CLIP_TYPE": ("value", "norm"),
}
_SHARES = (
    "MODEL.RPN.NMS_THRESH",
    "MODEL.ROI_HEADS.POSITIVE_FRACTION",
    "MODEL.ROI_HEADS.NMS_THRESH_TEST",
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST",
    "MODEL.RETINANET.NMS_THRESH_TEST",
    "MODEL.RETINANET.SCORE_THRESH_TEST",
)
_NOT_NEGATIVE = (
    "SOLVER.WEIGHT_DECAY",
    "SOLVER.GAMMA",
    "SOLVER.WARMUP_FACTOR",
    "SOLVER.BIAS_LR_FACTOR",
)
_POSITIVE = ("SOLVER.BASE_LR", "SOLVER.CLIP_GRADIENTS.CLIP_VALUE")
_STAGES = 5  # of a ResNet that can be frozen: the stem and res2 to res5
_LARGEST_SEED = 2**32 - 2**16  # NumPy's, with room for the ranks, which add their numbers


def check_detectron2_keys(cfg: CfgNode) -> None:
    """Raise :class:`ConfigError` on the first value that Detectron2 cannot use."""
    for key, at_least in _AT_LEAST.items():
        check_int(key, value_of(cfg, key), at_least)
    for key, choices in _CHOICES.items():
        check_choice(key, value_of(cfg, key), choices)
    for key in _SHARES:
        if not 0 <= value_of(cfg, key) <= 1:
            raise ConfigError(f"{key} must be 0 to 1, got {value_of(cfg, key)}")
    for key in _NOT_NEGATIVE:
        if not 0 <= value_of(cfg, key) < math.inf:
            raise ConfigError(f"{key} must be a number from 0, got {value_of(cfg, key)}")
    for key in _POSITIVE:
        check_positive_number(key, value_of(cfg, key))
    _check_model(cfg.MODEL)
    _check_sizes(cfg.INPUT)
    solver = cfg.SOLVER
    steps = solver.STEPS
    is_increasing = fits(steps, list[float]) and sorted(set(steps)) == list(steps)
    if not is_increasing or any(step < 1 for step in steps):
        raise ConfigError(f"SOLVER.STEPS must be increasing iterations from 1 on, got {steps}")
    if not 0 <= solver.MOMENTUM < 1:
        raise ConfigError(f"SOLVER.MOMENTUM must be at least 0 and below 1, got {solver.MOMENTUM}")
    if cfg.SEED > _LARGEST_SEED:
        raise ConfigError(f"SEED must be at most {_LARGEST_SEED}, got {cfg.SEED}")


def _check_model(model: CfgNode) -> None:
    stages = model.BACKBONE.FREEZE_AT
    if "resnet" in model.BACKBONE.NAME and not 0 <= stages <= _STAGES:
        raise ConfigError(f"MODEL.BACKBONE.FREEZE_AT must be 0 to {_STAGES}, got {stages}")
    for key in ("PIXEL_MEAN", "PIXEL_STD"):
        if not fits(model[key], list[float]) or len(model[key]) != len(model.PIXEL_MEAN):
            raise ConfigError(
                f"MODEL.{key} must be one finite number per channel, got {model[key]}"
            )
    if 0 in model.PIXEL_STD:
        raise ConfigError(f"MODEL.PIXEL_STD must not be 0, got {model.PIXEL_STD}")


def _check_sizes(node: CfgNode) -> None:
    """Check the keys of INPUT that say how images are resized and cropped."""
    for split in ("TRAIN", "TEST"):
        sizes = shorter_sides(node[f"MIN_SIZE_{split}"])
        if not sizes:
            raise ConfigError(f"INPUT.MIN_SIZE_{split} is empty: name a size")
        for size in sizes:
            # In evaluation, 0 keeps the size of images.
            check_int(f"INPUT.MIN_SIZE_{split}", size, at_least=1 if split == "TRAIN" else 0)
    if node.MIN_SIZE_TRAIN_SAMPLING == "range" and len(shorter_sides(node.MIN_SIZE_TRAIN)) != 2:
        raise ConfigError(
            "INPUT.MIN_SIZE_TRAIN_SAMPLING range needs an INPUT.MIN_SIZE_TRAIN of two numbers, got "
            f"{node.MIN_SIZE_TRAIN}"
        )
    size = node.CROP.SIZE
    most = 1 if node.CROP.TYPE.startswith("relative") else math.inf
    is_good = fits(size, tuple[float, float]) and all(0 < side <= most for side in size)
    if node.CROP.ENABLED and not is_good:
        what = "shares of 0 to 1" if most == 1 else "pixels"
        raise ConfigError(f"INPUT.CROP.SIZE must be two numbers, {what}, got {size}")
