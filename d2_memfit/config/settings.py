# Copyright (c) the d2_memfit developers.
"""The settings of a run, parsed and checked once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Optional

from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer
from detectron2.utils import comm

from ..common import compat
from ..common.checks import check_all, check_positive_int
from ..common.errors import ConfigError
from ..memory import auto_budget_gb
from ..techniques.host import workers_bytes
from ..techniques.registry import TECHNIQUES
from ..techniques.technique import Technique
from .cards import PRESETS
from .keys import check_arguments, checks_of
from .load import with_memfit_keys, with_settings

__all__ = ["NormalizerOptions", "RecoveryOptions", "Settings", "auto_scale_workers"]
__all__ += ["check_settings"]


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
        check_arguments(
            {"MEMFIT.NORMALIZERS.POLICY": self.policy, "MEMFIT.NORMALIZERS.LOSSES": self.losses}
        )


@dataclass(frozen=True)
class Settings:
    """The checked settings of a run.

    Attributes:
        cfg: the frozen yacs config, with all keys of d2_memfit, scaled to the ranks, and with
            MEMFIT.BUDGET_GB as a number or None.
        ranks: processes that train together.
    """

    cfg: CfgNode
    ranks: int

    @classmethod
    def from_cfg(cls, cfg: CfgNode, ranks: Optional[int] = None, trains: bool = True) -> "Settings":
        """Check a config, and fill in what it leaves open.

        Args:
            ranks: processes that train together; None for those of this run.
            trains: False for an evaluation, which does not read the keys of training.

        Raises:
            ConfigError: some values cannot work, and the message names all of them. Or BUDGET_GB is
                "auto", and free memory cannot be measured.
        """
        ranks_here = compat.local_world_size() if comm.get_world_size() > 1 else ranks
        ranks = comm.get_world_size() if ranks is None else ranks
        check_positive_int("num_gpus", ranks)
        cfg = check_settings(with_memfit_keys(cfg), ranks, trains)
        budget_gb = cfg.MEMFIT.BUDGET_GB
        if budget_gb is None and cfg.MEMFIT.PRESET:
            budget_gb = PRESETS[cfg.MEMFIT.PRESET]
        if budget_gb == "auto":
            of_workers = workers_bytes(cfg, ranks)
            budget_gb = auto_budget_gb(cfg.MODEL.DEVICE, ranks_here or ranks, of_workers)
        cfg = with_settings(cfg, {"MEMFIT.BUDGET_GB": budget_gb})
        cfg.freeze()
        return cls(cfg, ranks)

    @cached_property
    def recovery(self) -> Optional[RecoveryOptions]:
        """Options of recovery; None if an out-of-memory error is to end the run."""
        cfg, oom = self.cfg, self.cfg.MEMFIT.OOM
        if oom.POLICY == "raise":
            return None
        return RecoveryOptions(oom.LAST_RESORT, cfg.OUTPUT_DIR, cfg.MEMFIT.BUDGET_GB)

    @cached_property
    def normalizers(self) -> NormalizerOptions:
        """Options for the counts that losses are divided by."""
        node = self.cfg.MEMFIT.NORMALIZERS
        return NormalizerOptions(node.POLICY, node.LOSSES)


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
    checks = [*checks_of(cfg, trains)]
    if trains and ranks is not None:
        for technique in TECHNIQUES:
            if "ranks" in technique.needs and ranks < 2:
                checks.append(([technique.key], partial(_check_off, technique, cfg)))
        batch = ("SOLVER.IMS_PER_BATCH", "SOLVER.ACCUMULATION_STEPS")
        checks.append((batch, partial(auto_scale_workers, cfg, ranks)))
    check_all(checks)
    return cfg if ranks is None or not trains else auto_scale_workers(cfg, ranks)


def _check_off(technique: Technique, cfg: CfgNode) -> None:
    if technique.is_on(cfg):
        raise ConfigError(
            f"{technique.key} shares memory among ranks, and there is one rank. Set it "
            f"{technique.off}"
        )


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
    number = reference or num_workers
    if batch % number:
        raise ConfigError(
            f"SOLVER.IMS_PER_BATCH must be divisible by {what}, {number}, got {batch}"
        )
    if reference == 0 or (steps == 1 and reference == num_workers):
        return cfg
    scaled = DefaultTrainer.auto_scale_workers(cfg, num_workers * steps)
    batch = scaled.SOLVER.IMS_PER_BATCH // steps
    return with_settings(scaled, {"SOLVER.IMS_PER_BATCH": batch, "SOLVER.REFERENCE_WORLD_SIZE": 0})
