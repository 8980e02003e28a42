# Copyright (c) the d2_memfit developers.
"""The training loop of torchvision's references, with micro-batches and recovery.

Its source is references/detection/engine.py of https://github.com/pytorch/vision. The optimizer,
the scheduler and the loop are its own. ``trainer.accumulate`` takes the place of the forward,
``zero_grad`` and the backward.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Optional

import torch
from detectron2.utils.events import get_event_storage
from torch import nn

from d2_memfit import AccumulatingTrainer

__all__ = ["detection_losses", "train_one_epoch"]


def detection_losses(model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
    """The ``loss_fn`` of torchvision's detectors, which take images and targets."""
    images, targets = batch
    return model(images, targets)


def train_one_epoch(
    trainer: AccumulatingTrainer,
    optimizer: torch.optim.Optimizer,
    data_loader: Iterable[Any],
    device: str,
    lr_scheduler: Optional[torch.optim.lr_scheduler.LRScheduler] = None,
) -> list[dict[str, float]]:
    """Train on each batch of a loader; return the losses of each.

    Args:
        data_loader: its batches are columns, (images, targets).
    """
    trainer.model.train()
    history = []
    for images, targets in data_loader:
        batch = [i.to(device) for i in images], [_moved(t, device) for t in targets]
        history.append(trainer.accumulate(batch))
        optimizer.step()
        if lr_scheduler is not None:
            lr_scheduler.step()
        get_event_storage().step()
    return history


def _moved(target: Mapping[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in target.items()}
