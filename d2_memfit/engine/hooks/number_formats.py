# Copyright (c) the d2_memfit developers.
"""A comparison of a job's losses in 16 bits with those in float32."""

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ...memory import is_out_of_memory
from ..losses import SameDraws, without_traces

__all__ = ["compare_number_formats"]

logger = logging.getLogger(__name__)

_ALIKE = 0.1  # relative distance; Detectron2's losses have less in float16


def compare_number_formats(
    model: nn.Module,
    losses: Callable[[], Mapping[str, torch.Tensor]],
    autocast: AbstractContextManager[Any],
) -> bool:
    """Log how far losses under autocast are from those in float32, with the same random numbers.

    No gradient is computed, and the model, random states and log stay as they are. If a forward
    fails, training shows the error.

    Returns:
        bool: False if memory ran out. Fewer images can then be compared.
    """
    is_enough = True
    failure = ""
    try:
        with without_traces(model):
            with SameDraws():
                full = {name: loss.item() for name, loss in losses().items()}
            with SameDraws(), autocast:
                half = {name: loss.item() for name, loss in losses().items()}
    except Exception as e:  # an error of the model, or of memory
        failure = type(e).__name__
        is_enough = not is_out_of_memory(e)
    if failure:
        logger.info("Losses in 16 bits are not compared with those in float32: %s", failure)
        return is_enough
    said = ", ".join(f"{name} {half[name]:.4g} for {loss:.4g}" for name, loss in full.items())
    away = [abs(half[name] - loss) / max(abs(loss), 1e-6) for name, loss in full.items()]
    if all(distance <= _ALIKE for distance in away):
        worst = max(away, default=0.0)
        logger.info(
            "Losses in 16 bits are within %.2g%% of those in float32: %s", 100 * worst, said
        )
    else:
        logger.warning(
            "Losses in 16 bits are not those in float32: %s. If training diverges, set "
            "SOLVER.AMP.ENABLED False, or MEMFIT.AMP_DTYPE bfloat16 where the card supports it",
            said,
        )
    return True
