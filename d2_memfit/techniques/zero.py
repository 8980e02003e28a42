# Copyright (c) the d2_memfit developers.
"""Optimizer states sharded over the ranks (ZeRO, stage 1)."""

from detectron2.config import CfgNode
from detectron2.utils import comm
from torch.optim import Optimizer

from ..errors import ConfigError
from .registry import TECHNIQUES, BooleanTechnique

__all__ = ["ShardedOptimizerStates"]


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
        from .sharded_optimizer import ShardedOptimizer  # a second of imports

        cls.check(cfg, comm.get_world_size())
        return ShardedOptimizer(optimizer)
