# Copyright (c) the d2_memfit developers.
"""Options for recovery, and for the counts that losses are divided by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

from .rules import check_arguments

__all__ = ["NormalizerOptions", "RecoveryOptions"]


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
        keys = ("grow_after", "allow_resize", "last_resort", "max_skipped")
        check_arguments({f"MEMFIT.OOM.{key.upper()}": (key, getattr(self, key)) for key in keys})


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
        values = {f"MEMFIT.NORMALIZERS.{k.upper()}": (k, v) for k, v in vars(self).items()}
        check_arguments(values)
