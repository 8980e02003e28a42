# Copyright (c) the d2_memfit developers.
"""An exponential moving average of a model's weights, on PyTorch's ``AveragedModel``."""

import math
from functools import partial
from typing import Any

import torch
from detectron2.engine import HookBase
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from d2_memfit.common.compat import without_ddp

__all__ = ["AverageWeights", "averaged_model"]


def averaged_model(model: nn.Module, decay: float, tau: float) -> AveragedModel:
    """The average of a model's weights and buffers, which starts as a copy.

    The first update copies the weights again. In update n the decay is
    decay x (1 - exp(-n / tau)), as in rf-detr's ModelEma.
    """
    update = partial(_update, decay, tau)
    return AveragedModel(model, multi_avg_fn=update, use_buffers=True).requires_grad_(False)


@torch.no_grad()
def _update(
    decay: float, tau: float, averages: list[Tensor], current: list[Tensor], num_updates: Tensor
) -> None:
    """Update tensors of one dtype in place."""
    if averages[0].is_floating_point():
        decay *= 1 - math.exp(-(num_updates.item() + 1) / tau)
        get_ema_multi_avg_fn(decay)(averages, current, num_updates)
        return
    for average, value in zip(averages, current):  # such as the indices of a window's positions
        average.copy_(value)


class AverageWeights(HookBase):
    """Updates ``ema`` of the trainer's model after each iteration. Register it on all ranks,
    before the hooks that save and evaluate.
    """

    def after_step(self) -> None:
        detector: Any = without_ddp(self.trainer.model)
        detector.ema.update_parameters(detector.model)
