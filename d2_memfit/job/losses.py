# Copyright (c) the d2_memfit developers.
"""The losses of a batch: the model's own, or those of a function in its place."""

from collections.abc import Callable, Mapping
from typing import Any, Optional, Union

import torch
from torch import nn

__all__ = ["LossFn", "losses_of"]

LossFn = Callable[[nn.Module, Any], Union[torch.Tensor, Mapping[str, torch.Tensor]]]


def losses_of(
    model: nn.Module, batch: Any, loss_fn: Optional[LossFn] = None
) -> Mapping[str, torch.Tensor]:
    """The losses by name, of ``loss_fn(model, batch)`` or of ``model(batch)``."""
    losses = model(batch) if loss_fn is None else loss_fn(model, batch)
    return {"total_loss": losses} if isinstance(losses, torch.Tensor) else losses
