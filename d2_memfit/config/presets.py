# Copyright (c) the d2_memfit developers.
"""Budgets by the nominal memory of a card."""

from typing import Optional

from ..common.checks import did_you_mean
from ..errors import ConfigError

__all__ = ["PRESETS", "budget_of_preset", "why_no_card_has"]

# Memory, in GB of 2^30 bytes, that a process may take of a card of a nominal size: the smallest
# "total capacity" that PyTorch reports for one, less 0.1. A card with a desktop has 0.3 to 1 GB
# less: MEMFIT.BUDGET_GB "auto" measures the free memory.
#
# Drivers from 2024 on keep some 0.4 GB, earlier ones 0.2: a 6 GB RTX 2060 had 5.79
# (facebookresearch/meshrcnn#92) and has 5.60. The smallest found in public logs, November 2026:
# 4: RTX 3050 Laptop, 3.62. 5: MIG slice 1g.5gb of an A100, 4.75. 6: 5.60. 8: RTX 2080 SUPER, 7.60.
# 10: RTX 3080, 9.62 (9.78 in zai-org/CogVideo#34). 11: RTX 2080 Ti, 10.56. 12: RTX 3060, 11.62.
# 16: T4, 14.56 (Zheng-Chong/CatVTON#133). 24: A10 and L4, 21.96 (23,028 MiB in nvidia-smi:
# modal-labs/modal-client#2797). 32: RTX 5090, 31.34 (31.37 in Wan-Video/Wan2.1#465). 40: A100,
# 39.38. 48: L40, 44.34 (44.40 in QwenLM/Qwen3-VL#2097). 80: A100, 79.14 (lianqi1008/Control-GIC#6).
PRESETS = {
    "4GB": 3.5,
    "5GB": 4.6,
    "6GB": 5.5,
    "8GB": 7.5,
    "10GB": 9.5,
    "11GB": 10.4,
    "12GB": 11.5,
    "16GB": 14.4,
    "24GB": 21.8,
    "32GB": 31.2,
    "40GB": 39.2,
    "48GB": 44.2,
    "80GB": 79.0,
}


def budget_of_preset(name: str) -> float:
    """The budget of a preset, in GB.

    Raises:
        ConfigError: there is no such preset.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"there is no preset {name!r}{did_you_mean(str(name), PRESETS)}. There are "
            f"{', '.join(PRESETS)}; for other amounts, MEMFIT.BUDGET_GB takes any number"
        )
    return PRESETS[name]


def why_no_card_has(budget_gb: float) -> Optional[str]:
    """The problem with a budget that equals a card's nominal memory; None if there is none."""
    for name, usable_gb in PRESETS.items():
        if usable_gb < budget_gb <= float(name[: -len("GB")]):
            return (
                f"MEMFIT.BUDGET_GB {budget_gb:g}: a process can take about {usable_gb:g} GB of a "
                f"card that is sold as {name}. To plan for such a card: --card {name}"
            )
    return None
