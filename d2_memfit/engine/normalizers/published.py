# Copyright (c) the d2_memfit developers.
"""Losses of well-known models that are close to the full batch's, and not equal."""

from fnmatch import fnmatchcase

from torch import nn

__all__ = ["published_distance"]

# By class of a part of the model: patterns of losses, and how far from those of one forward they
# may be in five images of 10, 3, 1, 0 and 5 objects. docs/ACCUMULATION.md has the same table.
_PUBLISHED = {
    "FastRCNNOutputLayers": {"loss_cls*": 0.3, "loss_box_reg*": 0.5},
    "BaseMaskRCNNHead": {"loss_mask*": 0.5},
    "BaseKeypointRCNNHead": {"loss_keypoint*": 0.5},
    "SemSegFPNHead": {"loss_sem_seg": 0.5},
    "DenseDetector": {"loss_cls": 0.2, "loss_box_reg": 0.2},
    "DensePoseROIHeads": {"loss_densepose*": 1.0},
    # CenterMask2's.
    "MaskIoUHead": {"loss_mask": 0.5, "loss_maskiou": 0.5},
    # BoxInst's mean over pixels of similar colour.
    "DynamicMaskHead": {"loss_pairwise": 1.5},
    "SOLOv2": {"loss_cate": 0.1},
    # Its contrastive loss compares the images of a batch.
    "OneFormer": {"loss_contrastive": 2.0, "loss_ce*": 0.05},
    # DiffusionDet's matching has near ties, which the rounding of float32 decides.
    "SetCriterionDynamicK": {"*": 0.3},
    # DINO, MaskDINO, RT-DETR: denoising queries follow the most crowded image of a batch.
    "Module": {"*_dn*": 1.0},
}


def published_distance(model: nn.Module, loss: str) -> float:
    """The distance that the documentation states for a loss of this model; 0 if it states none."""
    kinds = {kind.__name__ for part in model.modules() for kind in type(part).__mro__}
    found = [
        distance
        for kind in kinds & _PUBLISHED.keys()
        for pattern, distance in _PUBLISHED[kind].items()
        if fnmatchcase(loss, pattern)
    ]
    return max(found, default=0.0)
