# Copyright (c) the d2_memfit developers.
"""The settings of a run, parsed and checked once, and its number formats."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional, Union

import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer
from detectron2.utils import comm

from ..common import compat
from ..common.checks import check_all, check_device, check_positive_int, choice
from ..common.errors import ConfigError
from ..memory import auto_budget_gb
from ..techniques.host import workers_bytes
from .cards import PRESETS
from .keys import KEYS, checks_of
from .load import with_memfit_keys, with_settings

__all__ = ["NormalizerOptions", "Precision", "RecoveryOptions", "auto_scale_workers"]
__all__ += ["check_arguments", "check_settings", "checked_cfg"]

logger = logging.getLogger(__name__)


def check_arguments(values: Mapping[str, Any]) -> None:
    """Check the values of some keys of :data:`KEYS`, which are arguments in Python.

    Raises:
        ConfigError: some cannot work. The message has a line for each.
    """
    checks = {key.name: key.check for key in KEYS}
    check_all(([name], partial(checks[name], name, value)) for name, value in values.items())


@dataclass(frozen=True)
class RecoveryOptions:
    """The keys of the config's node MEMFIT.OOM, and other values that recovery needs.

    Args:
        last_resort: see the key of this name.
        output_dir: folder of memfit_oom.jsonl; "" for none.
        budget_gb: MEMFIT.BUDGET_GB, for messages.

    Raises:
        ConfigError: a value cannot work.
    """

    last_resort: str = "raise"
    output_dir: str = ""
    budget_gb: Optional[float] = None

    def __post_init__(self) -> None:
        check_arguments({"MEMFIT.OOM.LAST_RESORT": self.last_resort})

    @classmethod
    def from_cfg(cls, cfg: CfgNode) -> "Optional[RecoveryOptions]":
        """The options of a config; None if an out-of-memory error is to end the run."""
        if cfg.MEMFIT.OOM.POLICY == "raise":
            return None
        return cls(cfg.MEMFIT.OOM.LAST_RESORT, cfg.OUTPUT_DIR, cfg.MEMFIT.BUDGET_GB)


@dataclass(frozen=True)
class NormalizerOptions:
    """The keys of the config's node MEMFIT.NORMALIZERS.

    Args:
        policy, losses: see the keys of these names.

    Raises:
        ConfigError: a value cannot work.
    """

    policy: str = "window"
    losses: Sequence[Sequence[str]] = ()

    def __post_init__(self) -> None:
        check_arguments({f"MEMFIT.NORMALIZERS.{k.upper()}": v for k, v in vars(self).items()})

    @classmethod
    def from_cfg(cls, cfg: CfgNode) -> "NormalizerOptions":
        return cls(cfg.MEMFIT.NORMALIZERS.POLICY, cfg.MEMFIT.NORMALIZERS.LOSSES)


def checked_cfg(cfg: CfgNode, ranks: int, trains: bool = True) -> CfgNode:
    """Check a config, and fill in what it leaves open.

    Args:
        ranks: processes that train together.
        trains: False for an evaluation, which does not read the keys of training.

    Returns:
        CfgNode: frozen, with all keys of d2_memfit, scaled to the ranks, and with MEMFIT.BUDGET_GB
        as a number or None.

    Raises:
        ConfigError: some values cannot work, and the message names all of them. Or BUDGET_GB is
            "auto", and free memory cannot be measured.
    """
    check_positive_int("num_gpus", ranks)
    cfg = check_settings(with_memfit_keys(cfg), ranks, trains)
    budget_gb = cfg.MEMFIT.BUDGET_GB or PRESETS.get(cfg.MEMFIT.PRESET)
    if budget_gb == "auto":
        ranks_here = compat.local_world_size() if comm.get_world_size() > 1 else ranks
        budget_gb = auto_budget_gb(cfg.MODEL.DEVICE, ranks_here, workers_bytes(cfg, ranks))
    cfg = with_settings(cfg, {"MEMFIT.BUDGET_GB": budget_gb})
    cfg.freeze()
    return cfg


def check_settings(cfg: CfgNode, ranks: Optional[int] = None, trains: bool = True) -> CfgNode:
    """Check a config that has all keys of d2_memfit.

    Args:
        ranks: the number of ranks; None if it is not known.
        trains: False for an evaluation, which does not read the keys of training.

    Returns:
        CfgNode: the config, scaled to the ranks by :func:`auto_scale_workers`.

    Raises:
        ConfigError: some values cannot work. The message has a line for each.
    """
    if ranks is None or not trains:
        check_all(checks_of(cfg, trains))
        return cfg
    scaled = partial(auto_scale_workers, cfg, ranks)
    check_all([*checks_of(cfg), (["SOLVER.IMS_PER_BATCH", "SOLVER.ACCUMULATION_STEPS"], scaled)])
    return scaled()


def auto_scale_workers(cfg: CfgNode, num_workers: int) -> CfgNode:
    """Scale a config by Detectron2's rule. A rank that accumulates K batches counts as K ranks.

    With SOLVER.REFERENCE_WORLD_SIZE 8, SOLVER.IMS_PER_BATCH 16 is an 8-GPU recipe of 2 images per
    GPU. One GPU with SOLVER.ACCUMULATION_STEPS 8 runs it as IMS_PER_BATCH 2 x 8. The effective
    batch is the same, so learning rate, steps and iterations do not change. With ACCUMULATION_STEPS
    4 the effective batch is halved. Detectron2 then halves the learning rate and doubles the
    iterations. Without REFERENCE_WORLD_SIZE, IMS_PER_BATCH is used unchanged.

    Returns:
        CfgNode: a new config with REFERENCE_WORLD_SIZE 0, so that it is not scaled again; or the
        same config if there is nothing to do.
    """
    steps = cfg.SOLVER.get("ACCUMULATION_STEPS", 1)
    batch, reference = cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.REFERENCE_WORLD_SIZE
    what = "SOLVER.REFERENCE_WORLD_SIZE" if reference else "the number of ranks"
    ranks = reference or num_workers
    if batch % ranks:
        raise ConfigError(f"SOLVER.IMS_PER_BATCH must be divisible by {what}, {ranks}, got {batch}")
    if reference == 0 or (steps == 1 and reference == num_workers):
        return cfg
    scaled = DefaultTrainer.auto_scale_workers(cfg, num_workers * steps)
    batch = scaled.SOLVER.IMS_PER_BATCH // steps
    return with_settings(scaled, {"SOLVER.IMS_PER_BATCH": batch, "SOLVER.REFERENCE_WORLD_SIZE": 0})


class Precision:
    """The number formats of forward, backward and optimizer step.

    On a GPU, float16 works as in Detectron2's ``AMPTrainer``.

    Args:
        name: "float32", "float16" or "bfloat16".
        device: device of the model.

    Raises:
        ConfigError: the name is none of these, or the GPU has no bfloat16.
    """

    def __init__(self, name: str, device: Union[torch.device, str]) -> None:
        choice("float32", "float16", "bfloat16")("the precision", name)
        device = check_device(str(device))
        self.dtype: torch.dtype = getattr(torch, name)
        self.device_type = device.type
        can_tell = name == "bfloat16" and device.type == "cuda" and torch.cuda.is_available()
        if can_tell and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ConfigError(
                "MEMFIT.AMP_DTYPE bfloat16 needs a GPU of the Ampere generation or later, and this "
                f"is {torch.cuda.get_device_name(device)}. Set MEMFIT.AMP_DTYPE float16"
            )
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "float16")

    @classmethod
    def from_cfg(cls, cfg: CfgNode, device: Optional[str] = None) -> "Precision":
        """The precision from SOLVER.AMP.ENABLED and MEMFIT.AMP_DTYPE.

        Args:
            device: in place of MODEL.DEVICE.
        """
        name = cfg.MEMFIT.AMP_DTYPE if cfg.SOLVER.AMP.ENABLED else "float32"
        return cls(name, cfg.MODEL.DEVICE if device is None else device)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context for a forward."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of ``loss`` to the existing ones, scaled in float16."""
        self.scaler.scale(loss).backward()

    def step(self, optimizer: torch.optim.Optimizer, iteration: int = 0) -> None:
        """Step with the complete gradients of an iteration. Call it once per iteration.

        Args:
            iteration: used in the warning about a skipped step.
        """
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        if (scale := self.scaler.get_scale()) < before:
            text = "Iteration %d: gradients overflowed float16. The step is skipped, and the loss "
            text += "scale is lowered to %g. If each iteration says so: MEMFIT.AMP_DTYPE bfloat16"
            logger.warning(text, iteration, scale)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state under Detectron2's key; empty in other formats than float16."""
        return {"grad_scaler": self.scaler.state_dict()} if self.scaler.is_enabled() else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "grad_scaler" in state_dict:  # not if the checkpoint was trained in another format
            self.scaler.load_state_dict(state_dict["grad_scaler"])
