# Copyright (c) the d2_memfit developers.
"""What a log says of a loss that is infinite or NaN."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from detectron2.layers import FrozenBatchNorm2d
from detectron2.structures import Boxes, RotatedBoxes
from torch import nn

from .window import MicroBatch, dataset_dicts, image_names

__all__ = ["described", "has_random_weights_behind_frozen_norms"]


def described(model: nn.Module, micro_batch: MicroBatch) -> str:
    """The losses that are not finite, their images, and a cause that can be seen."""
    bad = {k: x.item() for k, x in micro_batch.losses.items() if not math.isfinite(x.item())}
    losses = ", ".join(f"{name} {value:g}" for name, value in bad.items())
    return f"{losses} on the images {image_names(micro_batch.data)}. {_cause(model, micro_batch)}"


def has_random_weights_behind_frozen_norms(model: nn.Module) -> bool:
    """Whether no weights were loaded into a model's frozen batch norm, which normalises nothing."""
    norms = [m for m in model.modules() if isinstance(m, FrozenBatchNorm2d)]
    # Caffe2's have no statistics, but a bias.
    return bool(norms) and not any(bool(n.running_mean.any() or n.bias.any()) for n in norms)


def _cause(model: nn.Module, micro_batch: MicroBatch) -> str:
    if not all(p.isfinite().all() for p in model.parameters()):
        return "The weights are not finite: lower SOLVER.BASE_LR"
    for image in dataset_dicts(micro_batch.data):
        if fault := _fault(image):
            return f"{image.get('file_name', 'An image')} has {fault}"
    if has_random_weights_behind_frozen_norms(model):
        return (
            "Frozen batch norm does not normalise the activations of random weights: name "
            "MODEL.WEIGHTS, or set MODEL.RESNETS.NORM GN and MODEL.BACKBONE.FREEZE_AT 0"
        )
    return (
        "The weights and these images are finite. With mixed precision, try MEMFIT.AMP_DTYPE "
        "bfloat16 or SOLVER.AMP.ENABLED False; then look at these annotations; then lower "
        "SOLVER.BASE_LR"
    )


def _fault(image: Mapping[str, Any]) -> str:
    instances: Any = image.get("instances")
    fields = instances.get_fields() if hasattr(instances, "get_fields") else {}
    for name, value in [("image", image.get("image")), *fields.items()]:
        tensor = getattr(value, "tensor", value)  # of Boxes
        if isinstance(tensor, torch.Tensor) and not tensor.isfinite().all():
            return f"values in {name} that are not finite"
        if isinstance(value, (Boxes, RotatedBoxes)) and not value.nonempty().all():
            return "a box without width or height"
    return ""
