# Copyright (c) the d2_memfit developers.
"""Options that choose which counts of losses are taken over the whole window."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detectron2.config import CfgNode

from ..common.checks import check_choice
from ..errors import ConfigError

__all__ = ["NormalizerOptions"]

_COUNTS = ("objects",)


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
            is_pair = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
            if not is_pair or not isinstance(pair[0], str) or pair[1] not in _COUNTS:
                raise ConfigError(
                    "MEMFIT.NORMALIZERS.LOSSES must be pairs of a pattern of names of losses and "
                    f'"objects", such as [["loss_mask*", "objects"]], got {pair!r}'
                )

    @classmethod
    def from_cfg(cls, cfg: CfgNode) -> "NormalizerOptions":
        node: Mapping[str, Any] = cfg.MEMFIT.NORMALIZERS
        return cls(**{key.lower(): value for key, value in node.items()})
