# Copyright (c) the d2_memfit developers.
"""Mask and keypoint heads that process a few proposals at a time."""

from collections.abc import Callable
from typing import Any, Optional

import torch
from detectron2.modeling.roi_heads import BaseKeypointRCNNHead, BaseMaskRCNNHead
from torch import nn

from ..common.compat import BatchNorm
from ..common.errors import ConfigError
from .checkpointing import Recomputed
from .technique import Technique, wrap_method

__all__ = ["ChunkedHeads"]


class ChunkedHeads(Technique):
    """Runs mask and keypoint heads on a few proposals at a time, and again for the backward.

    Saves these layers' activations except for one chunk; they grow with the number of objects in an
    image. Costs a second forward of these layers, a few percent of an iteration.

    Source: He et al., "Mask R-CNN", arXiv:1703.06870, whose heads process each proposal by itself.

    Key: Proposals that go through the layers of a mask or keypoint head at a time. None: all, as in
    Detectron2.
    """

    key = "MEMFIT.HEADS.CHUNK_SIZE"

    def suggest(self, job: Any, model: nn.Module) -> Optional[int]:
        return 32 if _heads(model) else None

    def apply(self, model: nn.Module, chunk_size: int) -> nn.Module:
        if not _heads(model):
            raise ConfigError(
                f"{self.key}: the model has no mask or keypoint head of Detectron2, so nothing "
                "would change. Set it None"
            )
        for head in _heads(model):
            name = type(head).__name__
            if any(isinstance(m, BatchNorm) for m in head.modules()):
                raise ConfigError(
                    f"{self.key}: the {name} has batch normalisation, whose statistics are those "
                    "of all proposals. Set it None, or the head's NORM GN"
                )
            if "layers" not in type(head).forward.__code__.co_names:
                raise ConfigError(
                    f"{self.key}: the {name} has its own forward, without layers. Set it None"
                )
            wrap_method(head, "layers", _layers_in_chunks, Recomputed(), chunk_size)
        return model


def _heads(model: nn.Module) -> list[nn.Module]:
    heads = (BaseMaskRCNNHead, BaseKeypointRCNNHead)
    return [module for module in model.modules() if isinstance(module, heads)]


def _layers_in_chunks(
    head: nn.Module,
    layers: Callable[..., Any],
    recomputed: Recomputed,
    chunk_size: int,
    x: torch.Tensor,
) -> torch.Tensor:
    return torch.cat([recomputed(head, layers, chunk) for chunk in x.split(chunk_size)])
