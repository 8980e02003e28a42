# Copyright (c) the d2_memfit developers.
"""Options for recovery, and for the counts that losses are divided by."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from detectron2.config import CfgNode

from ..common.checks import check_bool, check_choice, check_number, check_positive_int, fits
from ..errors import ConfigError

__all__ = ["NormalizerOptions", "RecoveryOptions"]

_COUNTS = ("objects",)


@dataclass(frozen=True)
class RecoveryOptions:
    """The keys of the config's node MEMFIT.OOM, and other facts that recovery needs.

    Args:
        grow_after, allow_resize, last_resort, max_skipped: as the keys.
        output_dir: folder of the record; "" for none.
        budget_gb: MEMFIT.BUDGET_GB, for messages.

    Raises:
        ConfigError: a value cannot work.
    """

    grow_after: int = 1000
    allow_resize: bool = False
    last_resort: str = "raise"
    max_skipped: float = 0.001
    output_dir: str = ""
    budget_gb: Optional[float] = None

    def __post_init__(self) -> None:
        check_positive_int("MEMFIT.OOM.GROW_AFTER", self.grow_after)
        check_choice("MEMFIT.OOM.LAST_RESORT", self.last_resort, ("raise", "skip"))
        check_bool("MEMFIT.OOM.ALLOW_RESIZE", self.allow_resize)
        check_number("MEMFIT.OOM.MAX_SKIPPED", self.max_skipped, 1)

    @classmethod
    def from_cfg(cls, cfg: CfgNode) -> Optional["RecoveryOptions"]:
        """Options of a config; None if its policy is "raise"."""
        oom = cfg.MEMFIT.OOM
        if not isinstance(oom, Mapping):
            raise ConfigError(f"MEMFIT.OOM must be a node with keys, got {oom!r}")
        keys = {key.lower(): value for key, value in oom.items()}
        policy = keys.pop("policy")
        check_choice("MEMFIT.OOM.POLICY", policy, ("raise", "split"))
        options = cls(**keys, output_dir=cfg.OUTPUT_DIR, budget_gb=cfg.MEMFIT.BUDGET_GB)
        return None if policy == "raise" else options


@dataclass(frozen=True)
class NormalizerOptions:
    """The keys of the config's node MEMFIT.NORMALIZERS.

    Args:
        policy, losses: as the keys.

    Raises:
        ConfigError: a value cannot work.
    """

    policy: str = "window"
    losses: Sequence[Sequence[str]] = ()

    def __post_init__(self) -> None:
        check_choice("MEMFIT.NORMALIZERS.POLICY", self.policy, ("window", "exact", "off"))
        for pair in self.losses:
            if not fits(pair, tuple[str, str]) or pair[1] not in _COUNTS:
                raise ConfigError(
                    "MEMFIT.NORMALIZERS.LOSSES must be pairs of a pattern of names of losses and "
                    f'"objects", such as [["loss_mask*", "objects"]], got {pair!r}'
                )

    @classmethod
    def from_cfg(cls, cfg: CfgNode) -> "NormalizerOptions":
        node: Mapping[str, Any] = cfg.MEMFIT.NORMALIZERS
        return cls(**{key.lower(): value for key, value in node.items()})
