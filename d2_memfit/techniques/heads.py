# Copyright (c) the d2_memfit developers.
"""Mask and keypoint heads that process a few proposals at a time."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling.roi_heads import BaseKeypointRCNNHead, BaseMaskRCNNHead
from torch import nn

from ..common.patching import has_name
from ..compat.pytorch import BatchNorm
from ..errors import ConfigError
from .adapters import ADAPTERS, Adapter, AdapterTechnique
from .registry import TECHNIQUES, PositiveIntTechnique
from .support import own_class, recompute_in_backward

__all__ = ["ChunkedHeads"]


@TECHNIQUES.register()
class ChunkedHeads(AdapterTechnique, PositiveIntTechnique):
    """Runs mask and keypoint heads on a few proposals at a time, and again for the backward.

    Saves these layers' activations except for one chunk; they grow with the number of objects in an
    image. Costs a second forward of these layers, a few percent of an iteration.

    Source: He et al., "Mask R-CNN", arXiv:1703.06870, whose heads process each proposal by itself.

    Key: Proposals that go through the layers of a mask or keypoint head at a time. None: all, as in
    Detectron2.
    """

    key = "MEMFIT.HEADS.CHUNK_SIZE"
    what = "mask or keypoint head of Detectron2"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        has_heads = cfg.MODEL.MASK_ON or cfg.MODEL.KEYPOINT_ON
        return {"MEMFIT.HEADS.CHUNK_SIZE": 32} if has_heads else {}


@ADAPTERS.register()
class LayersOfHeads(Adapter):
    """``layers`` of a head for some of the proposals."""

    technique = "ChunkedHeads"
    attribute = "proposals_at_a_time"
    proposals_at_a_time: int

    @classmethod
    def find_in(cls, model: nn.Module, key: str) -> Iterable[nn.Module]:
        kinds = (BaseMaskRCNNHead, BaseKeypointRCNNHead)
        for head in (m for m in model.modules() if isinstance(m, kinds)):
            own = own_class(head)
            if any(isinstance(m, BatchNorm) for m in head.modules()):
                raise ConfigError(
                    f"{key}: the {own.__name__} has batch normalisation, whose statistics are "
                    "those of all proposals. Set it None, or the head's NORM GN"
                )
            if not has_name(own.forward.__code__, "layers"):
                raise ConfigError(
                    f"{key}: the {own.__name__} has its own forward, without layers. Set it None"
                )
            yield head

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        original: Any = super()
        run = original.layers
        if torch.is_grad_enabled():
            run = partial(recompute_in_backward, self, run)
        return torch.cat([run(chunk) for chunk in x.split(self.proposals_at_a_time)])
