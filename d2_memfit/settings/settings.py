# Copyright (c) the d2_memfit developers.
"""The settings of a run, parsed and checked once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Optional

from detectron2.config import CfgNode
from detectron2.utils import comm

from .. import compat
from ..common.checks import check_positive_int
from ..config import budget_of_preset, with_memfit_keys, with_settings
from ..memory import auto_budget_gb
from ..techniques import workers_bytes
from .key_checks import check_arguments, check_settings
from .lazy import named

__all__ = ["NormalizerOptions", "RecoveryOptions", "Settings"]


@dataclass(frozen=True)
class RecoveryOptions:
    """The keys of the config's node MEMFIT.OOM, and other values that recovery needs.

    Args:
        allow_resize, last_resort: see the keys of these names.
        output_dir: folder of memfit_oom.jsonl; "" for none.
        budget_gb: MEMFIT.BUDGET_GB, for messages.

    Raises:
        ConfigError: a value cannot work.
    """

    allow_resize: bool = False
    last_resort: str = "raise"
    output_dir: str = ""
    budget_gb: Optional[float] = None

    def __post_init__(self) -> None:
        check_arguments("MEMFIT.OOM", vars(self))


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
        check_arguments("MEMFIT.NORMALIZERS", vars(self))


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
    def from_cfg(
        cls,
        cfg: CfgNode,
        ranks: Optional[int] = None,
        name: Callable[[str], str] = str,
        trains: bool = True,
    ) -> "Settings":
        """Check a config, and fill in what it leaves open.

        Args:
            ranks: processes that train together; None for those of this run.
            name: returns the name that the user gave to a key, for errors.
            trains: False for an evaluation, which does not read the keys of training.

        Raises:
            ConfigError: some values cannot work, and the message names all of them. Or BUDGET_GB is
                "auto", and free memory cannot be measured.
        """
        is_a_rank = comm.get_world_size() > 1
        ranks = comm.get_world_size() if ranks is None else ranks
        check_positive_int("num_gpus", ranks)
        with named(name):
            cfg = check_settings(with_memfit_keys(cfg), ranks, trains=trains)
            if not cfg.is_frozen():
                cfg = cfg.clone()
                cfg.freeze()
            ranks_here = compat.local_world_size() if is_a_rank else ranks
            return cls(
                with_settings(cfg, {"MEMFIT.BUDGET_GB": _budget(cfg, ranks, ranks_here)}), ranks
            )

    @cached_property
    def recovery(self) -> Optional[RecoveryOptions]:
        """Options of recovery; None if an out-of-memory error is to end the run."""
        keys = {key.lower(): value for key, value in self.cfg.MEMFIT.OOM.items()}
        if keys.pop("policy") == "raise":
            return None
        cfg = self.cfg
        return RecoveryOptions(**keys, output_dir=cfg.OUTPUT_DIR, budget_gb=cfg.MEMFIT.BUDGET_GB)

    @cached_property
    def normalizers(self) -> NormalizerOptions:
        """Options for the counts that losses are divided by."""
        node = self.cfg.MEMFIT.NORMALIZERS
        return NormalizerOptions(**{key.lower(): value for key, value in node.items()})


def _budget(cfg: CfgNode, ranks: int, ranks_here: int) -> Optional[float]:
    """The budget in GB. MEMFIT.PRESET gives it, unless BUDGET_GB does; "auto" is measured."""
    budget_gb = cfg.MEMFIT.BUDGET_GB
    if budget_gb is None and cfg.MEMFIT.PRESET:
        return budget_of_preset(cfg.MEMFIT.PRESET)
    if budget_gb == "auto":
        return auto_budget_gb(cfg.MODEL.DEVICE, ranks_here, workers_bytes(cfg, ranks))
    return budget_gb
