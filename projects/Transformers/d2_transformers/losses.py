"""The losses of transformers' detectors, by name, as they stand in their sum."""

import importlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from d2_memfit.techniques.modules import replaced_functions

__all__ = ["collected_losses", "divided_by", "no_collectives", "weighted_losses"]

# Not divided by a number of objects: means over queries, and a metric.
_OTHER_MEANS = ("loss_ddf", "loss_cross_entropy")

# Where a loss all-reduces its number of objects.
_REDUCING = ("transformers.loss.loss_lw_detr", "transformers.loss.loss_rf_detr")


@contextmanager
def collected_losses(criterion: nn.Module) -> Iterator[dict[str, Tensor]]:
    """While open, the dict gets what a criterion returns, which its model only returns the sum of.

    The model weights these tensors in place. A criterion that is called for each layer counts them.
    """
    losses: dict[str, Tensor] = {}
    calls = 0

    def collect(module: nn.Module, args: Any, output: dict[str, Tensor]) -> None:
        nonlocal calls
        suffix = f"_call{calls}" if calls else ""
        losses.update((name + suffix, loss) for name, loss in output.items())
        calls += 1

    hook = criterion.register_forward_hook(collect)
    try:
        yield losses
    finally:
        hook.remove()


def weighted_losses(losses: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Losses of Deformable DETR and RF-DETR with the weights that they have in their sum."""
    weights = {
        "loss_ce": getattr(config, "class_loss_coefficient", 1),  # Deformable DETR has none
        "loss_bbox": config.bbox_loss_coefficient,
        "loss_giou": config.giou_loss_coefficient,
        "loss_mask_ce": getattr(config, "mask_class_loss_coefficient", 0),
        "loss_mask_dice": getattr(config, "mask_dice_loss_coefficient", 0),
    }
    names = {name: re.sub(r"(_\d+|_enc)$", "", name) for name in losses}
    # The mask losses of RF-DETR are tensors without elements where there are no objects.
    return {n: loss.sum() * weights[names[n]] for n, loss in losses.items() if names[n] in weights}


@contextmanager
def no_collectives() -> Iterator[None]:
    """While open, no loss communicates with other ranks: its number of objects is its batch's."""
    files = [importlib.import_module(name) for name in _REDUCING]
    with replaced_functions(
        files, {"_is_torch_distributed_initialized": lambda original: lambda: False}
    ):
        yield


def divided_by(
    losses: Mapping[str, Tensor], num_objects: float, new_num_objects: float
) -> dict[str, Tensor]:
    """Losses that were divided by one number of objects, divided by another."""
    factor = num_objects / new_num_objects
    return {
        name: loss if name.startswith(_OTHER_MEANS) else loss * factor
        for name, loss in losses.items()
    }
