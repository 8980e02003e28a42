# Copyright (c) the d2_memfit developers.
"""Bit masks of an image's instances, shared by its proposals without copies."""

from typing import Any, Optional, Union

import torch
from detectron2.config import CfgNode
from detectron2.layers import ROIAlign
from detectron2.modeling.roi_heads import ROIHeads
from detectron2.structures import BitMasks, ImageList, Instances
from torch import nn

from ..errors import ConfigError
from .registry import TECHNIQUES, BooleanTechnique
from .support import add_mixin

__all__ = ["SharedBitMaskTargets", "SharedBitMasks"]

_CROPPED_AT_ONCE = 8  # number of masks with float32 copies at a time


@TECHNIQUES.register()
class SharedBitMaskTargets(BooleanTechnique):
    """Makes proposals refer to the bit masks of their instances (INPUT.MASK_FORMAT "bitmask").

    Saves one copy of the matched instance's mask, at image size, for each sampled proposal.
    Detectron2 makes 512 per image, 550 MB at 800 x 1344 pixels, and one of each foreground proposal
    in float32. Costs nothing.

    Source: github.com/facebookresearch/detectron2/issues/1912
    """

    tier = "exact"
    part = "model"
    # Whether proposals share the bit masks of an image's instances, instead of copying them.
    key = "MEMFIT.HEADS.SHARED_BITMASKS"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        has_bitmasks = cfg.MODEL.MASK_ON and cfg.INPUT.MASK_FORMAT == "bitmask"
        return {"MEMFIT.HEADS.SHARED_BITMASKS": True} if has_bitmasks else {}

    @classmethod
    def apply(cls, model: nn.Module, cfg: CfgNode) -> nn.Module:
        heads = [module for module in model.modules() if isinstance(module, ROIHeads)]
        if not heads:
            raise ConfigError(
                "MEMFIT.HEADS.SHARED_BITMASKS: the model has no ROI heads of Detectron2, so "
                "nothing would change. Set it False"
            )
        for module in heads:
            add_mixin(module, _SharesBitMasks)
        return model


class _SharesBitMasks(nn.Module):
    def forward(
        self,
        images: ImageList,
        features: Any,
        proposals: list[Instances],
        targets: Optional[list[Instances]] = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if targets is not None:
            targets = [_with_shared_masks(target) for target in targets]
        return super().forward(images, features, proposals, targets, *args, **kwargs)


def _with_shared_masks(target: Instances) -> Instances:
    if not target.has("gt_masks") or type(target.gt_masks) is not BitMasks:
        return target
    fields = {**target.get_fields(), "gt_masks": SharedBitMasks(target.gt_masks.tensor)}
    return Instances(target.image_size, **fields)


class SharedBitMasks(BitMasks):
    """A selection of an image's masks, with repetitions.

    Args:
        masks: all masks of the image [M, height, width].
        index: positions of the selected masks [N]; None for all.
    """

    def __init__(self, masks: torch.Tensor, index: Optional[torch.Tensor] = None) -> None:
        self._masks = masks
        self._index = torch.arange(len(masks), device=masks.device) if index is None else index
        self.image_size = masks.shape[1:]

    @property
    def tensor(self) -> torch.Tensor:
        """A copy of all selected masks [N, height, width]."""
        return self._masks[self._index]

    @property
    def device(self) -> torch.device:
        return self._masks.device

    def to(self, *args: Any, **kwargs: Any) -> "SharedBitMasks":
        masks = self._masks.to(*args, **kwargs)
        return SharedBitMasks(masks, self._index.to(masks.device))

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, item: Union[int, slice, torch.Tensor]) -> "SharedBitMasks":
        index = self._index[item]
        return SharedBitMasks(self._masks, index[None] if index.dim() == 0 else index)

    def crop_and_resize(self, boxes: torch.Tensor, mask_size: int) -> torch.Tensor:
        """Masks within the boxes [N, mask_size, mask_size], bool, as ``BitMasks`` makes them."""
        assert len(boxes) == len(self), f"{len(boxes)} != {len(self)}"
        align = ROIAlign((mask_size, mask_size), 1.0, 0, aligned=True)
        output = torch.empty(len(self), mask_size, mask_size, dtype=torch.bool, device=self.device)
        for used in self._index.unique().split(_CROPPED_AT_ONCE):
            here = torch.isin(self._index, used).nonzero()[:, 0]
            position = torch.searchsorted(used, self._index[here])
            rois = torch.cat([position.to(boxes)[:, None], boxes[here]], dim=1)
            masks = self._masks[used].to(torch.float32)
            output[here] = align(masks[:, None], rois.to(self.device))[:, 0] >= 0.5
        return output
