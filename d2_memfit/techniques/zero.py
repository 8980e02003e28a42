# Copyright (c) the d2_memfit developers.
"""Optimizer states sharded over the ranks (ZeRO, stage 1)."""

import inspect
from typing import Any

from detectron2.config import CfgNode
from detectron2.utils import comm
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from ..errors import ConfigError
from .registry import TECHNIQUES, BooleanTechnique

__all__ = ["ShardedOptimizer", "ShardedOptimizerStates", "has_known_step"]


@TECHNIQUES.register()
class ShardedOptimizerStates(BooleanTechnique):
    """Makes each rank keep optimizer states, and update parameters, only for its share.

    Saves (1 - 1 / number of ranks) of the states: one copy of the parameters for SGD with momentum,
    two for Adam. Costs a broadcast of the parameters after each step. Checkpoints contain all
    states. Any number of ranks can load them, and so can Detectron2.

    Source: Rajbhandari et al., "ZeRO", arXiv:1910.02054; PyTorch's ``ZeroRedundancyOptimizer``.

    Key: Whether each rank keeps only its share of the optimizer's states. Needs at least two ranks.
    """

    tier = "exact"
    part = "optimizer"
    in_evaluation = True
    min_ranks = 2
    key = "MEMFIT.OPTIMIZER.ZERO"

    @classmethod
    def check(cls, cfg: CfgNode, num_ranks: int) -> None:
        if cls.is_on(cfg) and num_ranks < cls.min_ranks:
            raise ConfigError(
                "MEMFIT.OPTIMIZER.ZERO shares optimizer states among ranks, and there is one rank. "
                "Set it False"
            )

    @classmethod
    def apply(cls, optimizer: Optimizer, cfg: CfgNode) -> Optimizer:
        cls.check(cfg, comm.get_world_size())
        return ShardedOptimizer(optimizer)


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """An optimizer whose states are sharded over the ranks.

    Its state dict is complete on rank 0 after all ranks have called :meth:`consolidate_state_dict`,
    until the next step.

    Args:
        optimizer: gives class, parameters and options.

    Raises:
        ConfigError: it has its own step, which may need the gradients of all parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        cls = type(optimizer)
        if not has_known_step(cls):
            raise ConfigError(
                f"MEMFIT.OPTIMIZER.ZERO: the step of {cls.__name__} is not PyTorch's, so it may "
                "need the gradients of all parameters, as clipping them together does. Set it False"
            )
        known = inspect.signature(cls.__init__).parameters
        options = {k: v for k, v in optimizer.defaults.items() if k in known}
        super().__init__(optimizer.param_groups, optimizer_class=cls, **options)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self._all_state_dicts: list[Any] = []  # they are out of date
        return super().step(*args, **kwargs)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # The original empties the entries of its argument.
        super().load_state_dict({**state_dict, "state": dict(state_dict["state"])})
        self.state.clear()  # the states of this rank are in its share


def has_known_step(cls: type[Optimizer]) -> bool:
    """Whether an optimizer's step is PyTorch's, or Detectron2's with per-parameter clipping."""
    return cls.step.__module__.startswith(("torch.optim.", "detectron2.solver."))
