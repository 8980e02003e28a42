# Copyright (c) the d2_memfit developers.
"""Bit masks of an image's instances, shared by its proposals without copies."""

from collections.abc import Iterable
from typing import Any, Optional

from detectron2.config import CfgNode
from detectron2.modeling.roi_heads import ROIHeads
from detectron2.structures import ImageList, Instances
from torch import nn

from .adapters import ADAPTERS, Adapter, AdapterTechnique
from .registry import TECHNIQUES, BooleanTechnique
from .support import with_packed_masks

__all__ = ["SharedBitMaskTargets"]


@TECHNIQUES.register()
class SharedBitMaskTargets(AdapterTechnique, BooleanTechnique):
    """Makes proposals refer to the bit masks of their instances (INPUT.MASK_FORMAT "bitmask").

    Saves one copy of the matched instance's mask, at image size, for each sampled proposal.
    Detectron2 makes 512 per image, 550 MB at 800 x 1344 pixels, and one of each foreground proposal
    in float32. The instances' masks take a bit a pixel, in addition to those of the batch. Costs
    nothing.

    Source: github.com/facebookresearch/detectron2/issues/1912

    Key: Whether proposals share the bit masks of an image's instances, instead of copying them.
    """

    key = "MEMFIT.HEADS.SHARED_BITMASKS"
    what = "ROI heads of Detectron2"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        has_bitmasks = cfg.MODEL.MASK_ON and cfg.INPUT.MASK_FORMAT == "bitmask"
        return {"MEMFIT.HEADS.SHARED_BITMASKS": True} if has_bitmasks else {}


@ADAPTERS.register()
class MasksOfProposals(Adapter):
    """ROI heads that get packed masks."""

    technique = "SharedBitMaskTargets"
    attribute = "shares_bitmasks"

    @classmethod
    def find_in(cls, model: nn.Module, key: str) -> Iterable[nn.Module]:
        return [module for module in model.modules() if isinstance(module, ROIHeads)]

    def forward(
        self,
        images: ImageList,
        features: Any,
        proposals: list[Instances],
        targets: Optional[list[Instances]] = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        targets = with_packed_masks(targets)
        return super().forward(images, features, proposals, targets, *args, **kwargs)
