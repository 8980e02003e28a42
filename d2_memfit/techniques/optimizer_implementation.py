# Copyright (c) the d2_memfit developers.
"""The implementation of an optimizer's step."""

from functools import partial
from typing import Any

from detectron2.config import CfgNode
from torch.optim import Optimizer

from ..common.checks import check_choice
from ..errors import ConfigError
from .registry import TECHNIQUES, KeyTechnique

__all__ = ["OptimizerImplementation"]

_CHOICES = ("default", "for-loop", "foreach", "fused")


@TECHNIQUES.register()
class OptimizerImplementation(KeyTechnique):
    """Makes the optimizer update parameters one by one ("for-loop") or in one kernel ("fused").

    Saves the copy of all gradients that PyTorch's choice on a GPU, "foreach", makes for weight
    decay. Costs time with "for-loop", mostly with many small parameters, and none with "fused".

    Source: https://docs.pytorch.org/docs/stable/optim.html#algorithms
    """

    tier = "exact"
    part = "optimizer"
    gpu_only = True
    # "for-loop", "foreach" or "fused". "default" is PyTorch's choice for the device.
    key = "MEMFIT.OPTIMIZER.IMPLEMENTATION"
    off = "default"
    check_value = staticmethod(partial(check_choice, choices=_CHOICES))

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        return {"MEMFIT.OPTIMIZER.IMPLEMENTATION": "for-loop"}

    @classmethod
    def apply(cls, optimizer: Optimizer, cfg: CfgNode) -> Optimizer:
        name = cfg.MEMFIT.OPTIMIZER.IMPLEMENTATION
        options = {"foreach": name == "foreach", "fused": name == "fused"}
        if not options.keys() <= optimizer.defaults.keys():
            raise ConfigError(
                f"MEMFIT.OPTIMIZER.IMPLEMENTATION {name}: a {type(optimizer).__name__} has no "
                "other implementations. Set it 'default'"
            )

        optimizer.defaults.update(options)
        for group in optimizer.param_groups:
            group.update(options)

        def keep_options(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            """Checkpoints have options, too."""
            groups = [{**group, **options} for group in state["param_groups"]]
            return {**state, "param_groups": groups}

        optimizer.register_load_state_dict_pre_hook(keep_options)
        return optimizer


def has_known_step(cls: type[Optimizer]) -> bool:
    """Whether an optimizer's step is PyTorch's, or Detectron2's with per-parameter clipping."""
    return cls.step.__module__.startswith(("torch.optim.", "detectron2.solver."))
