# Copyright (c) the d2_memfit developers.
"""The likely cause of a loss that is infinite or NaN: the data, mixed precision, or the step."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Optional

import torch
from detectron2.structures import Boxes, RotatedBoxes
from detectron2.utils.events import get_event_storage
from torch import nn

from .window import dataset_dicts

__all__ = ["likely_cause"]

_GROWN = 10  # times the smallest of the last losses


def likely_cause(
    parameters: Iterable[nn.Parameter],
    data: Any,
    in_float32: Optional[Callable[[], Mapping[str, torch.Tensor]]],
) -> str:
    """The likely cause, for a micro-batch whose losses are not finite.

    Args:
        parameters: those of the model.
        data: a micro-batch's.
        in_float32: computes its losses again in float32; None if that is not possible, or if they
            were in float32.
    """
    if not all(p.isfinite().all() for p in parameters):
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
