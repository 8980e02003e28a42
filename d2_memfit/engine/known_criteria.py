# Copyright (c) the d2_memfit developers.
"""Known criteria whose counts cannot be seen from outside, each with its adapter."""

from typing import Any, Optional

import torch
from detectron2.modeling.meta_arch.dense_detector import DenseDetector
from detectron2.utils.events import get_event_storage
from torch import nn

from ..techniques.modules import add_mixin
from ..window_counts import window_count, window_share

__all__ = ["adapt_known_criteria"]


def adapt_known_criteria(model: nn.Module) -> None:
    """Make a model's known criteria ask for the window's counts."""
    for module in list(model.modules()):
        kind: Optional[type] = None
        if isinstance(module, DenseDetector):
            kind = _RunningNormalizer
        elif type(module).__name__ == "SetCriterionDynamicK":
            kind = _CountsMatches
        if kind is not None and not isinstance(module, kind):  # not adapted by an earlier trainer
            add_mixin(module, kind)


class _RunningNormalizer(nn.Module):
    """Detectron2's RetinaNet and FCOS: a running mean of the positive anchors in a batch.

    The mean is updated once per window. The window's number is estimated from the micro-batches so
    far, because the exact number would take another forward of all images.
    """

    def _ema_update(
        self, name: str, value: float, initial_value: float, momentum: float = 0.9
    ) -> float:
        share = window_share()
        if share == 1:
            return super()._ema_update(name, value, initial_value, momentum)  # type: ignore[misc]
        # Plain numbers of the module, so that a retry puts them back.
        state, iteration = vars(self), get_event_storage().iter
        is_over = state.get(f"{name}_share", 1.0) > 1 - 1e-6
        if is_over or state[f"{name}_of_window"] != iteration:
            state[f"{name}_of_window"] = iteration
            state[f"{name}_before"] = state.get(name, initial_value)
            state[f"{name}_sum"] = state[f"{name}_share"] = 0.0
        state[f"{name}_sum"] += value
        state[f"{name}_share"] += share
        estimate = state[f"{name}_sum"] / state[f"{name}_share"]
        state[name] = state[f"{name}_before"] * momentum + estimate * (1 - momentum)
        return float(state[name] * share)


class _CountsMatches(nn.Module):
    """DiffusionDet: each layer's losses are divided by the number of matched queries."""

    def get_loss(
        self, loss: str, outputs: Any, targets: Any, indices: Any, *args: Any, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        losses: dict[str, torch.Tensor] = super().get_loss(  # type: ignore[misc]
            loss, outputs, targets, indices, *args, **kwargs
        )
        matches = float(sum(len(objects) for _, objects in indices))
        factor = max(matches, 1.0) / window_count(matches)
        return {name: value * factor for name, value in losses.items()}
