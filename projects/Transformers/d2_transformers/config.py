# Copyright (c) the d2_memfit developers.
"""The config keys of this project."""

from functools import partial
from typing import Any

from detectron2.config import CfgNode

from d2_memfit.common.checks import (
    Check,
    check_all,
    check_positive_number,
    choice,
    fits,
    whole,
)
from d2_memfit.common.errors import ConfigError

from .data import resolutions
from .families import FAMILIES

__all__ = ["add_transformers_config", "check_transformers_config"]

_PAIRS = Check("a list of pairs [name, value]", lambda value: fits(value, list[tuple[str, Any]]))
_DECAY = Check("a number from 0, less than 1", lambda value: fits(value, float) and 0 <= value < 1)
_CHECKS = {
    "TYPE": choice(*FAMILIES),
    **dict.fromkeys(("NUM_QUERIES", "RESOLUTION", "MULTI_SCALE_STEPS"), whole(0)),
    "MULTI_SCALE_STRIDE": whole(),
    **dict.fromkeys(("OPTIONS", "LR_MULTIPLIERS"), _PAIRS),
    "EMA_DECAY": _DECAY,
    "EMA_TAU": check_positive_number,
}


def add_transformers_config(cfg: CfgNode) -> None:
    """Add the node TRANSFORMERS to a Detectron2 config. Use it with MODEL.META_ARCHITECTURE
    TransformersDetector. Classes are MODEL.ROI_HEADS.NUM_CLASSES; masks are MODEL.MASK_ON.
    """
    cfg.TRANSFORMERS = CfgNode()
    # "rf_detr", "rt_detr_v2" or "mask2former".
    cfg.TRANSFORMERS.TYPE = "rf_detr"
    # A size of that type, such as "nano"; families.py has them. Or a config.json of transformers,
    # or the folder that it is in.
    cfg.TRANSFORMERS.SIZE = "nano"
    # Keys of the transformers config with other values, such as [["dropout", 0.0]].
    cfg.TRANSFORMERS.OPTIONS = []
    # Object queries; 0 for those of the size.
    cfg.TRANSFORMERS.NUM_QUERIES = 0
    # Height and width in pixels that images are brought to, whatever their shape. 0 keeps the shape
    # and takes Detectron2's INPUT.MIN_SIZE_TRAIN and so on.
    cfg.TRANSFORMERS.RESOLUTION = 384
    # Whether each training batch has another resolution: RESOLUTION and up to this many steps of
    # MULTI_SCALE_STRIDE pixels less and more.
    cfg.TRANSFORMERS.MULTI_SCALE_STEPS = 0
    cfg.TRANSFORMERS.MULTI_SCALE_STRIDE = 32
    # Pretrained weights: a folder of save_pretrained, or a name on huggingface.co. "" is none.
    cfg.TRANSFORMERS.WEIGHTS = ""
    # Factors of the learning rate of parameters, by patterns of their names, such as
    # [["*.backbone.*", 0.1]]. The first pattern that matches counts.
    cfg.TRANSFORMERS.LR_MULTIPLIERS = []
    # Decay of an average of the weights, which is then what is evaluated and saved. 0 is none.
    # rf-detr has 0.993.
    cfg.TRANSFORMERS.EMA_DECAY = 0.0
    # Iterations in which the decay rises to that value: decay x (1 - exp(-iterations / tau)).
    cfg.TRANSFORMERS.EMA_TAU = 100.0


def check_transformers_config(cfg: CfgNode) -> None:
    """Raise :class:`ConfigError` with a line for each wrong value."""
    keys = cfg.TRANSFORMERS
    check_all(
        ([name], partial(check, f"TRANSFORMERS.{name}", keys[name]))
        for name, check in _CHECKS.items()
    )
    for _, factor in keys.LR_MULTIPLIERS:
        check_positive_number("TRANSFORMERS.LR_MULTIPLIERS", factor)
    family = FAMILIES[keys.TYPE]
    if (family.mask_class if cfg.MODEL.MASK_ON else family.box_class) is None:
        raise ConfigError(
            f"MODEL.MASK_ON must be {not cfg.MODEL.MASK_ON} with TRANSFORMERS.TYPE {keys.TYPE}"
        )
    if keys.MULTI_SCALE_STEPS and min(resolutions(cfg)) <= 0:
        raise ConfigError(
            f"TRANSFORMERS.MULTI_SCALE_STEPS {keys.MULTI_SCALE_STEPS} x MULTI_SCALE_STRIDE "
            f"{keys.MULTI_SCALE_STRIDE} must be less than TRANSFORMERS.RESOLUTION, got "
            f"{keys.RESOLUTION}"
        )
