# Copyright (c) the d2_memfit developers.
"""Mask and keypoint heads that process a few proposals at a time."""

from collections.abc import Callable
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.modeling.roi_heads import BaseKeypointRCNNHead, BaseMaskRCNNHead
from torch import nn

from ..common.patching import has_name
from ..compat.pytorch import BatchNorm
from ..errors import ConfigError
from .checkpointing import Recomputed
from .modules import wrap_method
from .registry import TECHNIQUES, PositiveIntTechnique

__all__ = ["ChunkedHeads"]

_HEADS = (BaseMaskRCNNHead, BaseKeypointRCNNHead)


@TECHNIQUES.register()
class ChunkedHeads(PositiveIntTechnique):
    """Runs mask and keypoint heads on a few proposals at a time, and again for the backward.

    Saves these layers' activations except for one chunk; they grow with the number of objects in an
    image. Costs a second forward of these layers, a few percent of an iteration.

    Source: He et al., "Mask R-CNN", arXiv:1703.06870, whose heads process each proposal by itself.

    Key: Proposals that go through the layers of a mask or keypoint head at a time. None: all, as in
    Detectron2.
    """

    tier = "exact"
    part = "model"
    key = "MEMFIT.HEADS.CHUNK_SIZE"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        has_heads = cfg.MODEL.MASK_ON or cfg.MODEL.KEYPOINT_ON
        return {"MEMFIT.HEADS.CHUNK_SIZE": 32} if has_heads else {}

    @classmethod
    def apply(cls, model: nn.Module, cfg: CfgNode) -> nn.Module:
        heads = [m for m in model.modules() if isinstance(m, _HEADS)]
        if not heads:
            raise ConfigError(
                f"{cls.key}: the model has no mask or keypoint head of Detectron2, so nothing "
                "would change. Set it None"
            )
        for head in heads:
            name = type(head).__name__
            if any(isinstance(m, BatchNorm) for m in head.modules()):
                raise ConfigError(
                    f"{cls.key}: the {name} has batch normalisation, whose statistics are those of "
                    "all proposals. Set it None, or the head's NORM GN"
                )
            if not has_name(type(head).forward.__code__, "layers"):
                raise ConfigError(
                    f"{cls.key}: the {name} has its own forward, without layers. Set it None"
                )
            wrap_method(
                head, "layers", _layers_in_chunks, Recomputed(), cfg.MEMFIT.HEADS.CHUNK_SIZE
            )
        return model


def _layers_in_chunks(
    head: nn.Module,
    layers: Callable[..., Any],
    recomputed: Recomputed,
    chunk_size: int,
    x: torch.Tensor,
) -> torch.Tensor:
    return torch.cat([recomputed(head, layers, chunk) for chunk in x.split(chunk_size)])
