# Copyright (c) the d2_memfit developers.
"""The likely cause of a loss that is infinite or NaN: weights, data, precision, or the step."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
from detectron2.layers import FrozenBatchNorm2d
from detectron2.structures import Boxes, RotatedBoxes
from detectron2.utils.events import get_event_storage
from torch import nn

from .window import dataset_dicts

__all__ = ["has_random_weights_behind_frozen_norms", "likely_cause"]

_GROWN = 10  # times the smallest of the last losses


def has_random_weights_behind_frozen_norms(model: nn.Module) -> bool:
    """Whether no weights were loaded into a model's frozen batch norm, which normalises nothing."""
    norms = [m for m in model.modules() if isinstance(m, FrozenBatchNorm2d)]
    # Caffe2's have no statistics, but a bias.
    return bool(norms) and not any(bool(n.running_mean.any() or n.bias.any()) for n in norms)


def likely_cause(
    model: nn.Module,
    data: Any,
    in_float32: Optional[Callable[[], Mapping[str, torch.Tensor]]],
) -> str:
    """The likely cause, for a micro-batch whose losses are not finite.

    Args:
        model: without DDP around it.
        data: a micro-batch's.
        in_float32: computes its losses again in float32; None if that is not possible, or if they
            were in float32.
    """
    if not all(p.isfinite().all() for p in model.parameters()):
        return "the learning rate, because the weights are not finite: lower SOLVER.BASE_LR"
    for image in dataset_dicts(data):
        if fault := _fault(image):
            return f"the data, because {image.get('file_name', 'an image')} has {fault}"
    if in_float32 is not None:
        with torch.no_grad():
            losses = in_float32()
        if math.isfinite(sum(loss.item() for loss in losses.values())):
            return (
                "mixed precision, because the losses are finite in float32: MEMFIT.AMP_DTYPE "
                "bfloat16, or SOLVER.AMP.ENABLED False"
            )
    if has_random_weights_behind_frozen_norms(model):
        return (
            "the random weights, because frozen batch norm does not normalise their activations: "
            "name MODEL.WEIGHTS, or set MODEL.RESNETS.NORM GN and MODEL.BACKBONE.FREEZE_AT 0"
        )
    last = _last_losses()
    if last and last[-1] > _GROWN * min(last):
        return (
            "the learning rate, because the losses have grown: lower SOLVER.BASE_LR, lengthen "
            "SOLVER.WARMUP_ITERS, or set SOLVER.CLIP_GRADIENTS.ENABLED True"
        )
    if not last and get_event_storage().iter > 0:  # just after a resume
        return (
            "the data or the learning rate, because the weights are finite and earlier losses are "
            "not known: look at these annotations, then lower SOLVER.BASE_LR"
        )
    return "the data, because weights and earlier losses are good: look at these annotations"


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


def _last_losses() -> list[float]:
    history = get_event_storage().histories().get("total_loss")
    return [value for value, _ in history.values()[-20:]] if history else []
