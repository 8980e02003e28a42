# Copyright (c) the d2_memfit developers.
"""Optimizer states: in 8 bits, or shared among the ranks (ZeRO, stage 1)."""

import inspect
import logging
from typing import Any, Optional

from detectron2.utils import comm
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..common.errors import ConfigError
from ..common.side_work import no_information
from .technique import Technique

__all__ = ["EightBitOptimizerStates", "ShardedOptimizerStates"]

_IN_8_BITS = {SGD: "SGD8bit", Adam: "Adam8bit", AdamW: "AdamW8bit"}


class EightBitOptimizerStates(Technique):
    """Keeps momentum and, for Adam, variance in 8 bits, in blocks with a scale each.

    Saves three quarters of the optimizer's states. Costs little time. Needs bitsandbytes. Optimizer
    states of checkpoints made without it cannot be resumed with it, nor the reverse.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861.

    Key: Whether the optimizer's states are kept in 8 bits.
    """

    tier, part, needs = "precision", "optimizer", frozenset({"evaluation"})
    key, off = "MEMFIT.OPTIMIZER.STATES_8BIT", False
    changes = "the rounding of the optimizer's states, to 8 bits"

    def suggest(self, job: Any, model: nn.Module) -> Optional[bool]:
        return None if job.cfg.MEMFIT.OPTIMIZER.ZERO else True  # ZeRO takes PyTorch's optimizers

    def apply(self, optimizer: Optimizer, value: bool) -> Optimizer:
        original = type(optimizer)
        base = next((c for c in original.__mro__ if c in _IN_8_BITS), None)
        if base is None or not _has_known_step(original):
            names = ", ".join(c.__name__ for c in _IN_8_BITS)
            raise ConfigError(
                f"{self.key} supports {names} with PyTorch's or Detectron2's steps, and not "
                f"{original.__name__}. Set it False"
            )
        if base is SGD and not all(
            g["momentum"] and not g["nesterov"] for g in optimizer.param_groups
        ):
            raise ConfigError(
                f"{self.key} needs SOLVER.MOMENTUM above 0, which is the state, and "
                "SOLVER.NESTEROV False, which bitsandbytes does not support"
            )
        try:
            with no_information(logging.WARNING):  # of its other operators
                import bitsandbytes
        except ImportError as e:
            raise ConfigError(
                f"{self.key} needs bitsandbytes ({e}): pip install bitsandbytes"
            ) from e
        new = getattr(bitsandbytes.optim, _IN_8_BITS[base])
        if original is not base:  # Detectron2's, with a step that clips gradients first
            new = type(original.__name__, (new,), dict(vars(original)))
        return new(optimizer.param_groups, **_options(optimizer, new))


class ShardedOptimizerStates(Technique):
    """Makes each rank keep optimizer states, and update parameters, only for its share.

    Saves (1 - 1 / number of ranks) of the states: one copy of the parameters for SGD with momentum,
    two for Adam. Costs a broadcast of the parameters after each step. Checkpoints contain all
    states. Any number of ranks can load them, and so can Detectron2.

    Source: Rajbhandari et al., "ZeRO", arXiv:1910.02054; PyTorch's ``ZeroRedundancyOptimizer``.

    Key: Whether each rank keeps only its share of the optimizer's states. Needs at least two ranks.
    """

    part, needs = "optimizer", frozenset({"ranks", "evaluation"})
    key, off = "MEMFIT.OPTIMIZER.ZERO", False

    def suggest(self, job: Any, model: nn.Module) -> bool:
        return True

    def apply(self, optimizer: Optimizer, value: bool) -> Optimizer:
        cls = type(optimizer)
        if not _has_known_step(cls):
            raise ConfigError(
                f"{self.key}: the step of {cls.__name__} is not PyTorch's, so it may need the "
                "gradients of all parameters, as clipping them together does. Set it False"
            )
        if comm.get_world_size() == 1:  # of a plan, which keeps a rank's share itself
            return optimizer
        from .sharded import ShardedOptimizer  # its import takes a third of a second

        options = _options(optimizer, cls)
        return ShardedOptimizer(optimizer.param_groups, optimizer_class=cls, **options)


def _has_known_step(cls: type[Optimizer]) -> bool:
    """Whether an optimizer's step is PyTorch's, or Detectron2's with per-parameter clipping."""
    return cls.step.__module__.startswith(("torch.optim.", "detectron2.solver."))


def _options(optimizer: Optimizer, cls: type[Optimizer]) -> dict[str, Any]:
    """The options of an optimizer that another class knows."""
    known = inspect.signature(cls.__init__).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in known}
