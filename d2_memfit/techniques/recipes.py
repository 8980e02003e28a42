# Copyright (c) the d2_memfit developers.
"""Number formats, frozen modules, and settings of Detectron2's own keys that need less memory."""

from collections.abc import Sequence
from typing import Any, Optional, Union

from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import ROI_MASK_HEAD_REGISTRY
from detectron2.modeling.roi_heads import BaseMaskRCNNHead
from torch import nn

from ..common.checks import shorter_sides, value_of
from ..common.errors import ConfigError
from .technique import Technique, find_modules

__all__ = ["FewerDetections", "FrozenModules", "MixedPrecision", "MoreFrozenStages", "OneImageSize"]
__all__ += ["PolygonMasks", "SmallerImages", "SmallerRoiBatch", "pretrained_part"]

_BACKBONE = "backbone"
# Parts with pretrained weights in Detectron2's FPN, in its ViTDet, and in models of transformers.
_PRETRAINED = (
    *("backbone.bottom_up", "backbone.net", "backbone.backbone", "backbone.model"),
    *("pixel_level_module.encoder", _BACKBONE),
)


class MixedPrecision(Technique):
    """Computes the forward in 16 bits where PyTorch's autocast allows it.

    Saves up to half of the activations. Weights, gradients, losses, ROI operators and labels stay
    in 32 bits. Published for Detectron2: 5% of all memory for Mask R-CNN, 17% for RetinaNet. Costs
    nothing on GPUs with tensor cores, which are faster with it.

    Source: Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740; Detectron2's
    SOLVER.AMP.
    """

    tier, part, needs = "precision", "config", frozenset({"float16"})
    changes = (
        "the rounding of activations, to 16 bits; with float16, iterations whose gradients "
        "overflow are skipped"
    )

    def settings(self, job: Any, model: nn.Module) -> dict[str, Any]:
        dtype = "bfloat16" if job.cfg.MODEL.DEVICE == "cpu" else "float16"
        return {"SOLVER.AMP.ENABLED": True, "MEMFIT.AMP_DTYPE": dtype}


class FrozenModules(Technique):
    """Freezes modules at their pretrained weights, as Detectron2 does with stages of a ResNet.

    Saves their gradients and optimizer states, and their activations if nothing before them is
    trained.

    Source: Detectron2's MODEL.BACKBONE.FREEZE_AT, which knows ResNets only.

    Key: The modules that are frozen. Give patterns of their names, or "backbone", which is the
    pretrained part of the backbone: a feature pyramid is trained. [] is none.
    """

    tier, key, off = "recipe", "MEMFIT.FINE_TUNE.FROZEN", []
    changes = (
        "they do not learn, and batch norms keep their statistics; they need pretrained weights, "
        "which are near the new task"
    )

    def suggest(self, job: Any, model: nn.Module) -> Optional[list[str]]:
        return [_BACKBONE] if job.is_pretrained and pretrained_part(model) else None

    def apply(self, model: nn.Module, patterns: Sequence[str]) -> nn.Module:
        names = [pretrained_part(model) if p == _BACKBONE else p for p in patterns]
        if "" in names:
            raise ConfigError(f"{self.key}: the model has no module named {_BACKBONE}")
        for module in find_modules(model, self.key, names):
            module.requires_grad_(False)
            FrozenBatchNorm2d.convert_frozen_batchnorm(module)
        return model


def pretrained_part(model: nn.Module) -> str:
    """Name of the part of a model's backbone that has pretrained weights; "" if there is none."""
    names = [name for name, _ in model.named_modules()]
    found = (n for part in _PRETRAINED for n in names if f".{n}".endswith(f".{part}"))
    return next(found, "")


class PolygonMasks(Technique):
    """Keeps annotated masks as polygons, drawn at the size of the mask head's output.

    Saves one bit mask of the image's size per instance: 800 MB were reported.

    Source: github.com/facebookresearch/detectron2/issues/1912
    """

    tier, part = "recipe", "config"
    changes = "pixels at the borders of masks; holes and run-length codes are not possible"

    def settings(self, job: Any, model: nn.Module) -> dict[str, Any]:
        cfg = job.cfg
        is_bitmask = cfg.MODEL.MASK_ON and cfg.INPUT.MASK_FORMAT == "bitmask"
        return {"INPUT.MASK_FORMAT": "polygon"} if is_bitmask and _draws_polygons(cfg) else {}


def _draws_polygons(cfg: Any) -> bool:
    """Whether the mask head draws polygons; Detectron2's do, PointRend's takes only bit masks."""
    head = ROI_MASK_HEAD_REGISTRY.get(cfg.MODEL.ROI_MASK_HEAD.NAME)
    return isinstance(head, type) and issubclass(head, BaseMaskRCNNHead)


class SmallerRoiBatch(Technique):
    """Halves the proposals per image that the ROI heads train on.

    Saves half of the activations of the box head, and of mask and keypoint heads, which run on the
    foreground quarter.

    Source: Girshick, "Fast R-CNN", arXiv:1504.08083, which takes 64 of an image, Detectron2 512.
    """

    tier, part = "recipe", "config"
    changes = "the sampling; small objects are seen less often"

    def settings(self, job: Any, model: nn.Module) -> dict[str, Any]:
        return _halved(job, "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", at_least=64)


class FewerDetections(Technique):
    """Halves the detections per image that are kept in evaluation.

    Saves the masks of the others, in the image's size.

    Source: github.com/facebookresearch/detectron2/issues/3949
    """

    tier, part = "recipe", "config"
    changes = "the recall on crowded images"

    def settings(self, job: Any, model: nn.Module) -> dict[str, Any]:
        return _halved(job, "TEST.DETECTIONS_PER_IMAGE", at_least=25)


class OneImageSize(Technique):
    """Trains all images at the smallest of the config's sizes, without multi-scale.

    Saves the memory of larger sizes: the largest determines the peak.

    Source: Detectron2's INPUT.MIN_SIZE_TRAIN.
    """

    tier, part = "recipe", "config"
    changes = "less augmentation"

    def settings(self, job: Any, model: nn.Module) -> dict[str, Any]:
        sizes = shorter_sides(job.cfg.INPUT.MIN_SIZE_TRAIN)
        return {"INPUT.MIN_SIZE_TRAIN": (min(sizes),)} if len(set(sizes)) > 1 else {}


class SmallerImages(Technique):
    """Trains and evaluates images at three quarters of their size.

    Saves 44% of all activations that belong to pixels.

    Source: Detectron2's INPUT.MIN_SIZE_TRAIN and INPUT.MAX_SIZE_TRAIN.
    """

    tier, part = "recipe", "config"
    changes = "small objects are harder to find"

    def settings(self, job: Any, model: nn.Module) -> dict[str, Any]:
        sizes = job.cfg.INPUT
        if min(shorter_sides(sizes.MIN_SIZE_TRAIN)) < 400:
            return {}
        names = ("MIN_SIZE_TRAIN", "MAX_SIZE_TRAIN", "MIN_SIZE_TEST", "MAX_SIZE_TEST")
        return {f"INPUT.{name}": _smaller(sizes[name]) for name in names}


class MoreFrozenStages(Technique):
    """Freezes one more stage of the backbone at its pretrained weights.

    Saves its activations, gradients and optimizer states.

    Source: Detectron2's MODEL.BACKBONE.FREEZE_AT.
    """

    tier, part = "recipe", "config"
    changes = "that stage does not learn; it needs pretrained weights"

    def settings(self, job: Any, model: nn.Module) -> dict[str, Any]:
        at = job.cfg.MODEL.BACKBONE.FREEZE_AT
        return {"MODEL.BACKBONE.FREEZE_AT": at + 1} if at < 4 and job.cfg.MODEL.WEIGHTS else {}


def _halved(job: Any, key: str, at_least: int) -> dict[str, int]:
    half = value_of(job.cfg, key) // 2
    return {key: half} if half >= at_least else {}


def _smaller(size: Union[int, Sequence[int]]) -> Union[int, tuple[int, ...]]:
    sides = tuple(side * 3 // 4 for side in shorter_sides(size))
    return sides[0] if isinstance(size, int) else sides
