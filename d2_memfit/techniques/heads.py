# Copyright (c) the d2_memfit developers.
"""Mask and keypoint heads that process a few proposals at a time."""

from functools import partial
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling.roi_heads import BaseKeypointRCNNHead, BaseMaskRCNNHead
from torch import nn

from ..compat.pytorch import BatchNorm
from ..errors import ConfigError
from .registry import TECHNIQUES, PositiveIntTechnique
from .support import add_mixin, recompute_in_backward

__all__ = ["ChunkedHeads"]


@TECHNIQUES.register()
class ChunkedHeads(PositiveIntTechnique):
    """Runs mask and keypoint heads on a few proposals at a time, and again for the backward.

    Saves these layers' activations except for one chunk; they grow with the number of objects in an
    image. Costs a second forward of these layers, a few percent of an iteration.

    Source: He et al., "Mask R-CNN", arXiv:1703.06870, whose heads process each proposal by itself.
    """

    tier = "exact"
    part = "model"
    # Proposals that go through the layers of a mask or keypoint head at a time. None: all, as
    # in Detectron2.
    key = "MEMFIT.HEADS.CHUNK_SIZE"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        has_heads = cfg.MODEL.MASK_ON or cfg.MODEL.KEYPOINT_ON
        return {"MEMFIT.HEADS.CHUNK_SIZE": 32} if has_heads else {}

    @classmethod
    def apply(cls, model: nn.Module, cfg: CfgNode) -> nn.Module:
        kinds = (BaseMaskRCNNHead, BaseKeypointRCNNHead)
        heads = [m for m in model.modules() if isinstance(m, kinds)]
        if not heads:
            raise ConfigError(
                "MEMFIT.HEADS.CHUNK_SIZE: the model has no mask or keypoint head of Detectron2. "
                "Set it None"
            )
        for head in heads:
            if any(isinstance(m, BatchNorm) for m in head.modules()):
                raise ConfigError(
                    f"MEMFIT.HEADS.CHUNK_SIZE: the {type(head).__name__} has batch normalisation, "
                    "whose statistics are those of all proposals. Set it None, or the head's NORM "
                    "GN"
                )
            add_mixin(head, _RunsInChunks, chunk_size=cfg.MEMFIT.HEADS.CHUNK_SIZE)
        return model


class _RunsInChunks(nn.Module):
    chunk_size: int

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        original: Any = super()  # the head's own class
        run = original.layers
        if torch.is_grad_enabled():
            run = partial(recompute_in_backward, self, run)
        return torch.cat([run(chunk) for chunk in x.split(self.chunk_size)])
