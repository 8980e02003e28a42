# Copyright (c) the d2_memfit developers.
"""Checks for Detectron2's own keys, for values that fail late or without naming the key.

Values that fail when the model is built have no check here.
"""

import math
from functools import partial
from typing import Any

from detectron2.config import CfgNode
from PIL import Image

from ..common.checks import check_choice, check_int, check_positive_number, fits, must
from ..data.sizes import shorter_sides
from ..errors import ConfigError
from .key_checks import KeyChecks

__all__ = ["CHECKS_FOR_PROJECTS", "DETECTRON2_CHECKS"]

# The smallest value of an integer.
_AT_LEAST = {
    "MODEL.RPN.BATCH_SIZE_PER_IMAGE": 1,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 1,
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
_STAGES = 5  # stages of a ResNet that can be frozen: the stem and res2 to res5
_LARGEST_SEED = 2**32 - 2**16  # NumPy's limit, less room for the rank that is added to it


def _are_increasing(value: Any) -> bool:
    are_numbers = fits(value, list[float]) and min(value, default=1) >= 1
    return are_numbers and sorted(set(value)) == list(value)


def _sizes(key: str, value: Any) -> None:
    sizes = shorter_sides(value)
    if not sizes:
        raise ConfigError(f"{key} is empty: name a size")
    for size in sizes:
        # In evaluation, 0 keeps the size of images.
        check_int(key, size, at_least=1 if key.endswith("TRAIN") else 0)


def _frozen_stages(cfg: CfgNode) -> None:
    stages = cfg.MODEL.BACKBONE.FREEZE_AT
    if "resnet" in cfg.MODEL.BACKBONE.NAME and not 0 <= stages <= _STAGES:
        raise ConfigError(f"MODEL.BACKBONE.FREEZE_AT must be 0 to {_STAGES}, got {stages}")


def _deviations(cfg: CfgNode) -> None:
    std = cfg.MODEL.PIXEL_STD
    if len(std) != len(cfg.MODEL.PIXEL_MEAN):
        raise ConfigError(f"MODEL.PIXEL_STD must be one finite number per channel, got {std}")
    if 0 in std:
        raise ConfigError(f"MODEL.PIXEL_STD must not be 0, got {std}")


def _range_of_sizes(cfg: CfgNode) -> None:
    sizes = cfg.INPUT.MIN_SIZE_TRAIN
    if cfg.INPUT.MIN_SIZE_TRAIN_SAMPLING == "range" and len(shorter_sides(sizes)) != 2:
        raise ConfigError(
            "INPUT.MIN_SIZE_TRAIN_SAMPLING range needs an INPUT.MIN_SIZE_TRAIN of two numbers, got "
            f"{sizes}"
        )


def _crop(cfg: CfgNode) -> None:
    crop = cfg.INPUT.CROP
    most = 1 if crop.TYPE.startswith("relative") else math.inf
    is_good = fits(crop.SIZE, tuple[float, float]) and all(0 < side <= most for side in crop.SIZE)
    if crop.ENABLED and not is_good:
        what = "shares of 0 to 1" if most == 1 else "pixels"
        raise ConfigError(f"INPUT.CROP.SIZE must be two numbers, {what}, got {crop.SIZE}")


_CHANNELS = must("one finite number per channel", lambda value: fits(value, list[float]))
# A project's own trainer may implement other choices, such as a sampler or a way to clip gradients.
CHECKS_FOR_PROJECTS = KeyChecks(
    {
        **{key: partial(check_int, at_least=number) for key, number in _AT_LEAST.items()},
        **dict.fromkeys(_SHARES, must("0 to 1", lambda value: 0 <= value <= 1)),
        **dict.fromkeys(_NOT_NEGATIVE, must("a number from 0", lambda v: 0 <= v < math.inf)),
        **dict.fromkeys(_POSITIVE, check_positive_number),
        **dict.fromkeys(("MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD"), _CHANNELS),
        "INPUT.MIN_SIZE_TRAIN": _sizes,
        "INPUT.MIN_SIZE_TEST": _sizes,
        "SOLVER.STEPS": must("increasing iterations from 1 on", _are_increasing),
        "SOLVER.MOMENTUM": must("at least 0 and below 1", lambda value: 0 <= value < 1),
        "SEED": must(f"at most {_LARGEST_SEED}", lambda value: value <= _LARGEST_SEED),
    },
    (
        (("MODEL.BACKBONE.FREEZE_AT",), _frozen_stages),
        (("MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD"), _deviations),
        (("INPUT.MIN_SIZE_TRAIN", "INPUT.MIN_SIZE_TRAIN_SAMPLING"), _range_of_sizes),
        (("INPUT.CROP.SIZE", "INPUT.CROP.TYPE"), _crop),
    ),
)
DETECTRON2_CHECKS = CHECKS_FOR_PROJECTS._replace(
    values={
        **CHECKS_FOR_PROJECTS.values,
        **{key: partial(check_choice, choices=names) for key, names in _CHOICES.items()},
    }
)
