# Copyright (c) the d2_memfit developers.
"""Settings of Detectron2's own keys that need less memory and change what is trained."""

from collections.abc import Iterable, Sequence
from typing import Any, Union

from detectron2.config import CfgNode
from detectron2.modeling import ROI_MASK_HEAD_REGISTRY
from detectron2.modeling.roi_heads import BaseMaskRCNNHead

from ..common.checks import value_of
from ..data import shorter_sides
from .registry import TECHNIQUES, Technique

__all__: list[str] = []  # they are found by their names


class _Recipe(Technique):
    tier = "recipe"


@TECHNIQUES.register()
class PolygonMasks(_Recipe):
    """Keeps annotated masks as polygons, drawn at the size of the mask head's output.

    Saves one bit mask of the image's size per instance: 800 MB were reported. Changes: pixels at
    the borders of masks; holes and run-length codes are not possible.

    Source: github.com/facebookresearch/detectron2/issues/1912
    """

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        is_bitmask = cfg.MODEL.MASK_ON and cfg.INPUT.MASK_FORMAT == "bitmask"
        return {"INPUT.MASK_FORMAT": "polygon"} if is_bitmask and _draws_polygons(cfg) else {}


def _draws_polygons(cfg: CfgNode) -> bool:
    """Whether the mask head draws polygons; Detectron2's do, PointRend's takes only bit masks."""
    head = ROI_MASK_HEAD_REGISTRY.get(cfg.MODEL.ROI_MASK_HEAD.NAME)
    return isinstance(head, type) and issubclass(head, BaseMaskRCNNHead)


@TECHNIQUES.register()
class FewerProposals(_Recipe):
    """Halves the proposals that the proposal network gives to the ROI heads.

    Saves their share of non-maximum suppression, matching and sampling. Changes: the heads choose
    from fewer proposals.

    Source: Lin et al., "Feature Pyramid Networks", arXiv:1612.03144, for the number of 1000.
    """

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        keys = ("MODEL.RPN.PRE_NMS_TOPK_TRAIN", "MODEL.RPN.POST_NMS_TOPK_TRAIN")
        return _halved(cfg, keys, at_least=250)


@TECHNIQUES.register()
class SmallerRoiBatch(_Recipe):
    """Halves the proposals per image that the ROI heads train on.

    Saves half of the activations of the box head, and of mask and keypoint heads, which run on the
    foreground quarter. Changes: the sampling; small objects are seen less often.

    Source: Girshick, "Fast R-CNN", arXiv:1504.08083, which takes 64 of an image, Detectron2 512.
    """

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        return _halved(cfg, ("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE",), at_least=64)


@TECHNIQUES.register()
class SmallerRpnBatch(_Recipe):
    """Halves the anchors per image in the proposal network's loss.

    Saves little: losses are small. Changes: the sampling.

    Source: Ren et al., "Faster R-CNN", arXiv:1506.01497, for the number of 256.
    """

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        return _halved(cfg, ("MODEL.RPN.BATCH_SIZE_PER_IMAGE",), at_least=64)


@TECHNIQUES.register()
class FewerDetections(_Recipe):
    """Halves the detections per image that are kept in evaluation.

    Saves the masks of the others, in the image's size. Changes: the recall on crowded images.

    Source: github.com/facebookresearch/detectron2/issues/3949
    """

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        return _halved(cfg, ("TEST.DETECTIONS_PER_IMAGE",), at_least=25)


@TECHNIQUES.register()
class FewerQueries(_Recipe):
    """Halves the queries of models that have them (DETR, MaskFormer, Mask2Former).

    Saves their share of the decoder, and of the masks of all queries. Changes: the number of
    objects that can be found; weights of queries no longer fit.

    Source: Carion et al., "End-to-End Object Detection with Transformers", arXiv:2005.12872.
    """

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        name = "NUM_OBJECT_QUERIES"
        nodes = [node for node in ("DETR", "MASK_FORMER") if name in cfg.MODEL.get(node, {})]
        return _halved(cfg, [f"MODEL.{node}.{name}" for node in nodes], at_least=50)


@TECHNIQUES.register()
class OneImageSize(_Recipe):
    """Trains all images at the smallest of the config's sizes, without multi-scale.

    Saves the memory of larger sizes: the largest determines the peak. Changes: less augmentation.

    Source: Detectron2's INPUT.MIN_SIZE_TRAIN.
    """

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        sizes = shorter_sides(cfg.INPUT.MIN_SIZE_TRAIN)
        return {"INPUT.MIN_SIZE_TRAIN": (min(sizes),)} if len(set(sizes)) > 1 else {}


@TECHNIQUES.register()
class SmallerImages(_Recipe):
    """Trains and evaluates images at three quarters of their size.

    Saves 44% of all activations that belong to pixels. Changes: small objects are harder to find.

    Source: Detectron2's INPUT.MIN_SIZE_TRAIN and INPUT.MAX_SIZE_TRAIN.
    """

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        if min(shorter_sides(cfg.INPUT.MIN_SIZE_TRAIN)) < 400:
            return {}
        names = ("MIN_SIZE_TRAIN", "MAX_SIZE_TRAIN", "MIN_SIZE_TEST", "MAX_SIZE_TEST")
        return {f"INPUT.{name}": _smaller(cfg.INPUT[name]) for name in names}


@TECHNIQUES.register()
class MoreFrozenStages(_Recipe):
    """Freezes one more stage of the backbone at its pretrained weights.

    Saves its activations, gradients and optimizer states. Changes: that stage does not learn; it
    needs pretrained weights.

    Source: Detectron2's MODEL.BACKBONE.FREEZE_AT.
    """

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        at = cfg.MODEL.BACKBONE.FREEZE_AT
        return {"MODEL.BACKBONE.FREEZE_AT": at + 1} if at < 4 and cfg.MODEL.WEIGHTS else {}


@TECHNIQUES.register()
class LighterBackbone(_Recipe):
    """Uses the next smaller ResNet: 152, 101, 50, 34, 18 layers.

    Saves activations, weights and optimizer states of the omitted layers. Changes: the model;
    MODEL.WEIGHTS must be those of the new one (Detectron2 has none for 34 and 18 layers, and
    converts torchvision's with its ``tools/convert-torchvision-to-d2.py``).

    Source: He et al., "Deep Residual Learning", arXiv:1512.03385; Detectron2's MODEL.RESNETS.DEPTH.
    """

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        resnets = cfg.MODEL.RESNETS
        if "resnet" not in cfg.MODEL.BACKBONE.NAME or resnets.NUM_GROUPS > 1:
            return {}
        smaller = [depth for depth in (101, 50, 34, 18) if depth < resnets.DEPTH]
        if not smaller:
            return {}
        settings = {"MODEL.RESNETS.DEPTH": smaller[0]}
        if smaller[0] < 50:
            has_c4_head = cfg.MODEL.ROI_HEADS.NAME == "Res5ROIHeads"
            if has_c4_head or resnets.RES5_DILATION > 1 or any(resnets.DEFORM_ON_PER_STAGE):
                return {}  # these need bottleneck blocks
            settings["MODEL.RESNETS.RES2_OUT_CHANNELS"] = 64
        return settings


def _halved(cfg: CfgNode, keys: Iterable[str], at_least: int) -> dict[str, int]:
    halves = {key: value_of(cfg, key) // 2 for key in keys}
    return {key: half for key, half in halves.items() if half >= at_least}


def _smaller(size: Union[int, Sequence[int]]) -> Union[int, tuple[int, ...]]:
    sides = tuple(side * 3 // 4 for side in shorter_sides(size))
    return sides[0] if isinstance(size, int) else sides
