# Copyright (c) the d2_memfit developers.
"""Settings of Detectron2's own keys that need less memory and change what is trained."""

from collections.abc import Sequence
from typing import Any, Union

from detectron2.config import CfgNode
from detectron2.modeling import ROI_MASK_HEAD_REGISTRY
from detectron2.modeling.roi_heads import BaseMaskRCNNHead

from ..common.checks import value_of
from ..data.sizes import shorter_sides
from .registry import TECHNIQUES, Technique

__all__ = [
    "FewerDetections",
    "MoreFrozenStages",
    "OneImageSize",
    "PolygonMasks",
    "SmallerImages",
    "SmallerRoiBatch",
]


class _Recipe(Technique):
    tier = "recipe"


@TECHNIQUES.register()
class PolygonMasks(_Recipe):
    """Keeps annotated masks as polygons, drawn at the size of the mask head's output.

    Saves one bit mask of the image's size per instance: 800 MB were reported.

    Source: github.com/facebookresearch/detectron2/issues/1912
    """

    changes = "pixels at the borders of masks; holes and run-length codes are not possible"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        is_bitmask = cfg.MODEL.MASK_ON and cfg.INPUT.MASK_FORMAT == "bitmask"
        return {"INPUT.MASK_FORMAT": "polygon"} if is_bitmask and _draws_polygons(cfg) else {}


def _draws_polygons(cfg: CfgNode) -> bool:
    """Whether the mask head draws polygons; Detectron2's do, PointRend's takes only bit masks."""
    head = ROI_MASK_HEAD_REGISTRY.get(cfg.MODEL.ROI_MASK_HEAD.NAME)
    return isinstance(head, type) and issubclass(head, BaseMaskRCNNHead)


@TECHNIQUES.register()
class SmallerRoiBatch(_Recipe):
    """Halves the proposals per image that the ROI heads train on.

    Saves half of the activations of the box head, and of mask and keypoint heads, which run on the
    foreground quarter.

    Source: Girshick, "Fast R-CNN", arXiv:1504.08083, which takes 64 of an image, Detectron2 512.
    """

    changes = "the sampling; small objects are seen less often"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        return _halved(cfg, "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", at_least=64)


@TECHNIQUES.register()
class FewerDetections(_Recipe):
    """Halves the detections per image that are kept in evaluation.

    Saves the masks of the others, in the image's size.

    Source: github.com/facebookresearch/detectron2/issues/3949
    """

    changes = "the recall on crowded images"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        return _halved(cfg, "TEST.DETECTIONS_PER_IMAGE", at_least=25)


@TECHNIQUES.register()
class OneImageSize(_Recipe):
    """Trains all images at the smallest of the config's sizes, without multi-scale.

    Saves the memory of larger sizes: the largest determines the peak.

    Source: Detectron2's INPUT.MIN_SIZE_TRAIN.
    """

    changes = "less augmentation"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        sizes = shorter_sides(cfg.INPUT.MIN_SIZE_TRAIN)
        return {"INPUT.MIN_SIZE_TRAIN": (min(sizes),)} if len(set(sizes)) > 1 else {}


@TECHNIQUES.register()
class SmallerImages(_Recipe):
    """Trains and evaluates images at three quarters of their size.

    Saves 44% of all activations that belong to pixels.

    Source: Detectron2's INPUT.MIN_SIZE_TRAIN and INPUT.MAX_SIZE_TRAIN.
    """

    changes = "small objects are harder to find"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        if min(shorter_sides(cfg.INPUT.MIN_SIZE_TRAIN)) < 400:
            return {}
        names = ("MIN_SIZE_TRAIN", "MAX_SIZE_TRAIN", "MIN_SIZE_TEST", "MAX_SIZE_TEST")
        return {f"INPUT.{name}": _smaller(cfg.INPUT[name]) for name in names}


@TECHNIQUES.register()
class MoreFrozenStages(_Recipe):
    """Freezes one more stage of the backbone at its pretrained weights.

    Saves its activations, gradients and optimizer states.

    Source: Detectron2's MODEL.BACKBONE.FREEZE_AT.
    """

    changes = "that stage does not learn; it needs pretrained weights"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        at = cfg.MODEL.BACKBONE.FREEZE_AT
        return {"MODEL.BACKBONE.FREEZE_AT": at + 1} if at < 4 and cfg.MODEL.WEIGHTS else {}


def _halved(cfg: CfgNode, key: str, at_least: int) -> dict[str, int]:
    half = value_of(cfg, key) // 2
    return {key: half} if half >= at_least else {}


def _smaller(size: Union[int, Sequence[int]]) -> Union[int, tuple[int, ...]]:
    sides = tuple(side * 3 // 4 for side in shorter_sides(size))
    return sides[0] if isinstance(size, int) else sides
