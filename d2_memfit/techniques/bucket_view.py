# Copyright (c) the d2_memfit developers.
"""Gradients that are views into the buffers of DistributedDataParallel."""

from typing import Any

from detectron2.config import CfgNode

from .registry import TECHNIQUES, BooleanTechnique

__all__ = ["GradientBucketView"]


@TECHNIQUES.register()
class GradientBucketView(BooleanTechnique):
    """Keeps a parameter's gradient in the buffer in which DDP reduces it, with several ranks.

    Saves a copy of all gradients on each rank. Costs nothing. Code that keeps or detaches gradients
    in place does not work with it.

    Source: ``gradient_as_bucket_view`` of
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
    """

    tier = "exact"
    part = "ddp"
    in_plans = False
    # Whether gradients are views into DDP's buffers, instead of additional copies.
    key = "MEMFIT.OPTIMIZER.GRADIENT_BUCKET_VIEW"

    @classmethod
    def apply(cls, kwargs: dict[str, Any], cfg: CfgNode) -> dict[str, Any]:
        return {**kwargs, "gradient_as_bucket_view": True}
