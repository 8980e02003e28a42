# Copyright (c) the d2_memfit developers.
"""Optimizer states in 8 bits."""

import inspect
import logging
from typing import Any

from detectron2.config import CfgNode
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..common.side_work import no_information
from ..errors import ConfigError
from .modules import has_known_step
from .registry import TECHNIQUES, BooleanTechnique

__all__ = ["EightBitOptimizerStates"]

_IN_8_BITS = {SGD: "SGD8bit", Adam: "Adam8bit", AdamW: "AdamW8bit"}


@TECHNIQUES.register()
class EightBitOptimizerStates(BooleanTechnique):
    """Keeps momentum and, for Adam, variance in 8 bits, in blocks with a scale each.

    Saves three quarters of the optimizer's states. Costs little time. Needs bitsandbytes. Optimizer
    states of checkpoints made without it cannot be resumed with it, nor the reverse.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861.

    Key: Whether the optimizer's states are kept in 8 bits.
    """

    tier = "precision"
    changes = "the rounding of the optimizer's states, to 8 bits"
    part = "optimizer"
    in_evaluation = True
    key = "MEMFIT.OPTIMIZER.STATES_8BIT"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        if cfg.MEMFIT.OPTIMIZER.ZERO:  # ZeRO takes PyTorch's optimizers
            return {}
        return super().enabling_settings(cfg)

    @classmethod
    def apply(cls, optimizer: Optimizer, cfg: CfgNode) -> Optimizer:
        original = type(optimizer)
        base = next((c for c in original.__mro__ if c in _IN_8_BITS), None)
        if base is None or not has_known_step(original):
            names = ", ".join(c.__name__ for c in _IN_8_BITS)
            raise ConfigError(
                f"MEMFIT.OPTIMIZER.STATES_8BIT supports {names} with PyTorch's or Detectron2's "
                f"steps, and not {original.__name__}. Set it False"
            )
        if base is SGD and not all(
            g["momentum"] and not g["nesterov"] for g in optimizer.param_groups
        ):
            raise ConfigError(
                "MEMFIT.OPTIMIZER.STATES_8BIT needs SOLVER.MOMENTUM above 0, which is the state, "
                "and SOLVER.NESTEROV False, which bitsandbytes does not support"
            )
        try:
            with no_information(logging.WARNING):  # of its other operators
                import bitsandbytes
        except ImportError as e:
            raise ConfigError(
                f"MEMFIT.OPTIMIZER.STATES_8BIT needs bitsandbytes ({e}): pip install bitsandbytes"
            ) from e
        new = getattr(bitsandbytes.optim, _IN_8_BITS[base])
        if original is not base:  # Detectron2's, with a step that clips gradients first
            new = type(original.__name__, (new,), dict(vars(original)))
        known = inspect.signature(new.__init__).parameters
        options = {k: v for k, v in optimizer.defaults.items() if k in known}
        return new(optimizer.param_groups, **options)
