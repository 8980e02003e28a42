# Copyright (c) the d2_memfit developers.
"""Checks of Detectron2's own keys, for values that fail late or without naming the key."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

from detectron2 import modeling
from detectron2.config import CfgNode
from detectron2.modeling.roi_heads.box_head import ROI_BOX_HEAD_REGISTRY
from detectron2.modeling.roi_heads.keypoint_head import ROI_KEYPOINT_HEAD_REGISTRY
from detectron2.modeling.roi_heads.mask_head import ROI_MASK_HEAD_REGISTRY
from fvcore.common.registry import Registry
from PIL import Image

from ..common.checks import check_choice, check_int, check_positive_number, did_you_mean, value_of
from ..data import shorter_sides
from ..errors import ConfigError

__all__ = ["check_data_keys", "check_model_keys", "check_solver_keys"]

_DEPTHS = (18, 34, 50, 101, 152)
_SAMPLERS = ("TrainingSampler", "RepeatFactorTrainingSampler", "RandomSubsetTrainingSampler")
_CROPS = ("relative_range", "relative", "absolute", "absolute_range")
_SHARES = (
    "MODEL.RPN.NMS_THRESH",
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
_STAGES = 5  # of a ResNet that can be frozen: the stem and res2 to res5
_FORMATS = (*Image.MODES, "BGR", "YUV-BT.601")
_LARGEST_SEED = 2**32 - 2**16  # NumPy's, with room for the ranks, which add their numbers
_SCHEDULES = ("WarmupMultiStepLR", "WarmupCosineLR", "WarmupStepWithFixedGammaLR")


def check_model_keys(cfg: CfgNode) -> None:
    """Raise :class:`ConfigError` on the first value that Detectron2's models cannot use."""
    model = cfg.MODEL
    _check_registered("MODEL", model, "META_ARCHITECTURE", modeling.META_ARCH_REGISTRY)
    _check_registered("MODEL.BACKBONE", model.BACKBONE, "NAME", modeling.BACKBONE_REGISTRY)
    if model.META_ARCHITECTURE in ("GeneralizedRCNN", "PanopticFPN", "ProposalNetwork"):
        generators = modeling.PROPOSAL_GENERATOR_REGISTRY
        if model.PROPOSAL_GENERATOR.NAME != "PrecomputedProposals":
            node = model.PROPOSAL_GENERATOR
            _check_registered("MODEL.PROPOSAL_GENERATOR", node, "NAME", generators)
        _check_registered("MODEL.RPN", model.RPN, "HEAD_NAME", modeling.RPN_HEAD_REGISTRY)
        check_int("MODEL.RPN.BATCH_SIZE_PER_IMAGE", model.RPN.BATCH_SIZE_PER_IMAGE, at_least=1)
    if model.META_ARCHITECTURE in ("GeneralizedRCNN", "PanopticFPN"):
        _check_roi_heads(model)
    if model.META_ARCHITECTURE == "RetinaNet":
        check_int("MODEL.RETINANET.NUM_CLASSES", model.RETINANET.NUM_CLASSES, at_least=1)
    if "resnet" in model.BACKBONE.NAME and model.RESNETS.DEPTH not in _DEPTHS:
        depths = ", ".join(map(str, _DEPTHS))
        raise ConfigError(f"MODEL.RESNETS.DEPTH must be one of {depths}, got {model.RESNETS.DEPTH}")
    if "resnet" in model.BACKBONE.NAME and not 0 <= model.BACKBONE.FREEZE_AT <= _STAGES:
        stages = model.BACKBONE.FREEZE_AT
        raise ConfigError(f"MODEL.BACKBONE.FREEZE_AT must be 0 to {_STAGES}, got {stages}")
    for key in ("PIXEL_MEAN", "PIXEL_STD"):
        if not _are_finite(model[key]) or len(model[key]) != len(model.PIXEL_MEAN):
            raise ConfigError(
                f"MODEL.{key} must be one finite number per channel, got {model[key]}"
            )
    for key in _SHARES:
        if not 0 <= value_of(cfg, key) <= 1:
            raise ConfigError(f"{key} must be 0 to 1, got {value_of(cfg, key)}")
    if 0 in model.PIXEL_STD:
        raise ConfigError(f"MODEL.PIXEL_STD must not be 0, got {model.PIXEL_STD}")


def _check_roi_heads(model: CfgNode) -> None:
    heads = modeling.ROI_HEADS_REGISTRY
    _check_registered("MODEL.ROI_HEADS", model.ROI_HEADS, "NAME", heads)
    if model.ROI_BOX_HEAD.NAME:  # C4 models have none
        _check_registered("MODEL.ROI_BOX_HEAD", model.ROI_BOX_HEAD, "NAME", ROI_BOX_HEAD_REGISTRY)
    if model.MASK_ON:
        node, registry = model.ROI_MASK_HEAD, ROI_MASK_HEAD_REGISTRY
        _check_registered("MODEL.ROI_MASK_HEAD", node, "NAME", registry)
    if model.KEYPOINT_ON:
        node, registry = model.ROI_KEYPOINT_HEAD, ROI_KEYPOINT_HEAD_REGISTRY
        _check_registered("MODEL.ROI_KEYPOINT_HEAD", node, "NAME", registry)
    for head in ("BOX", "MASK", "KEYPOINT"):
        key = f"ROI_{head}_HEAD.POOLER_RESOLUTION"
        check_int(f"MODEL.{key}", value_of(model, key), at_least=1)
    check_int("MODEL.ROI_HEADS.NUM_CLASSES", model.ROI_HEADS.NUM_CLASSES, at_least=1)
    per_image = model.ROI_HEADS.BATCH_SIZE_PER_IMAGE
    check_int("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", per_image, at_least=1)
    fraction = model.ROI_HEADS.POSITIVE_FRACTION
    if not _are_finite([fraction]) or not 0 < fraction <= 1:
        raise ConfigError(f"MODEL.ROI_HEADS.POSITIVE_FRACTION must be 0 to 1, got {fraction!r}")


def check_data_keys(cfg: CfgNode) -> None:
    """Raise :class:`ConfigError` on the first value that Detectron2's loaders cannot use."""
    check_int("DATALOADER.NUM_WORKERS", cfg.DATALOADER.NUM_WORKERS, at_least=0)
    check_choice("DATALOADER.SAMPLER_TRAIN", cfg.DATALOADER.SAMPLER_TRAIN, _SAMPLERS)
    check_choice("INPUT.FORMAT", cfg.INPUT.FORMAT, _FORMATS)
    check_choice("INPUT.MASK_FORMAT", cfg.INPUT.MASK_FORMAT, ("polygon", "bitmask"))
    check_choice("INPUT.RANDOM_FLIP", cfg.INPUT.RANDOM_FLIP, ("none", "horizontal", "vertical"))
    sampling = cfg.INPUT.MIN_SIZE_TRAIN_SAMPLING
    check_choice("INPUT.MIN_SIZE_TRAIN_SAMPLING", sampling, ("choice", "range"))
    for split in ("TRAIN", "TEST"):
        sizes = shorter_sides(cfg.INPUT[f"MIN_SIZE_{split}"])
        if not sizes:
            raise ConfigError(f"INPUT.MIN_SIZE_{split} is empty: name a size")
        for size in sizes:
            # In evaluation, 0 keeps the size of images.
            check_int(f"INPUT.MIN_SIZE_{split}", size, at_least=1 if split == "TRAIN" else 0)
        check_int(f"INPUT.MAX_SIZE_{split}", cfg.INPUT[f"MAX_SIZE_{split}"], at_least=1)
    if sampling == "range" and len(shorter_sides(cfg.INPUT.MIN_SIZE_TRAIN)) != 2:
        raise ConfigError(
            "INPUT.MIN_SIZE_TRAIN_SAMPLING range needs an INPUT.MIN_SIZE_TRAIN of two numbers, got "
            f"{cfg.INPUT.MIN_SIZE_TRAIN}"
        )
    if cfg.INPUT.CROP.ENABLED:
        check_choice("INPUT.CROP.TYPE", cfg.INPUT.CROP.TYPE, _CROPS)
        size = cfg.INPUT.CROP.SIZE
        most = 1 if cfg.INPUT.CROP.TYPE.startswith("relative") else math.inf
        if len(size) != 2 or not _are_finite(size) or not all(0 < side <= most for side in size):
            what = "shares of 0 to 1" if most == 1 else "pixels"
            raise ConfigError(f"INPUT.CROP.SIZE must be two numbers, {what}, got {size}")


def check_solver_keys(cfg: CfgNode) -> None:
    """Raise :class:`ConfigError` on the first value that would end training later."""
    solver = cfg.SOLVER
    if cfg.SEED > _LARGEST_SEED:
        raise ConfigError(f"SEED must be at most {_LARGEST_SEED}, got {cfg.SEED}")
    check_int("SOLVER.CHECKPOINT_PERIOD", solver.CHECKPOINT_PERIOD, at_least=1)
    check_int("TEST.EVAL_PERIOD", cfg.TEST.EVAL_PERIOD, at_least=0)
    check_int("VIS_PERIOD", cfg.VIS_PERIOD, at_least=0)
    for key in _NOT_NEGATIVE:
        if not 0 <= value_of(cfg, key) < math.inf:
            raise ConfigError(f"{key} must be a number from 0, got {value_of(cfg, key)}")
    check_int("SOLVER.WARMUP_ITERS", solver.WARMUP_ITERS, at_least=0)
    check_positive_number("SOLVER.BASE_LR", solver.BASE_LR)
    check_choice("SOLVER.LR_SCHEDULER_NAME", solver.LR_SCHEDULER_NAME, _SCHEDULES)
    steps = solver.STEPS
    if not _are_finite(steps) or sorted(set(steps)) != list(steps) or any(s < 1 for s in steps):
        raise ConfigError(f"SOLVER.STEPS must be increasing iterations from 1 on, got {steps}")
    clips = solver.CLIP_GRADIENTS
    if clips.ENABLED:
        check_choice("SOLVER.CLIP_GRADIENTS.CLIP_TYPE", clips.CLIP_TYPE, ("value", "norm"))
        check_positive_number("SOLVER.CLIP_GRADIENTS.CLIP_VALUE", clips.CLIP_VALUE)
    if not 0 <= solver.MOMENTUM < 1:
        raise ConfigError(f"SOLVER.MOMENTUM must be at least 0 and below 1, got {solver.MOMENTUM}")


def _check_registered(prefix: str, node: CfgNode, key: str, registry: Registry) -> None:
    name = node[key]
    if name not in registry:
        known = [registered for registered, _ in registry]
        hint = did_you_mean(str(name), known, cutoff=0.4)
        raise ConfigError(
            f"{prefix}.{key} {name!r} is not registered{hint}. This command knows the names of "
            "Detectron2. A project's own names are known to its own script"
        )


def _are_finite(values: Sequence[Any]) -> bool:
    return all(isinstance(v, numbers.Real) and math.isfinite(v) for v in values)
