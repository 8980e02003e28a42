"""Budgets by the size of a card."""

from detectron2.config import CfgNode

from .checks import near
from .errors import ConfigError

__all__ = ["PRESETS", "budget_of_preset", "with_preset"]

# What a process may take, in GB of 2^30 bytes, of a card that is sold with so many GB: what PyTorch
# says that it has ("total capacity"), on the smallest of that class, less 0.1. A card that draws a
# desktop too has 0.3 to 1 GB less: give MEMFIT.BUDGET_GB then.
#
# 4: GTX 1650, 3.81 (ultralytics/yolov5#285). 6: RTX 2060, 5.79 (facebookresearch/meshrcnn#92).
# 8: RTX 3070, 7.78 (akshitac8/OW-DETR#46). 11: 2080 Ti, 10.76 (RenYurui/StructureFlow#35).
# 12: RTX 3060, 11.75 (Kunhao-Liu/StyleGaussian#12). 16: T4, 14.56 (Zheng-Chong/CatVTON#133).
# 24: A30, 23.53 (google/RB-Modulation#5). 40: A100, 39.50 (TianheWu/CoSeR#10).
# 80: A100, 79.25 (levihsu/OOTDiffusion#235).
PRESETS = {
    "4GB": 3.7,
    "6GB": 5.6,
    "8GB": 7.6,
    "11GB": 10.6,
    "12GB": 11.6,
    "16GB": 14.4,
    "24GB": 23.4,
    "40GB": 39.4,
    "80GB": 79.1,
}


def budget_of_preset(name: str) -> float:
    """
    Raises:
        ConfigError: there is no such preset.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"there is no preset {name!r}{near(str(name), PRESETS)}. There are {', '.join(PRESETS)}"
        )
    return PRESETS[name]


def with_preset(cfg: CfgNode) -> CfgNode:
    """The config with MEMFIT.BUDGET_GB as MEMFIT.PRESET has it, unless it names a budget itself."""
    if not cfg.MEMFIT.PRESET or cfg.MEMFIT.BUDGET_GB is not None:
        return cfg
    changed = cfg.clone()
    changed.defrost()
    changed.MEMFIT.BUDGET_GB = budget_of_preset(cfg.MEMFIT.PRESET)
    if cfg.is_frozen():
        changed.freeze()
    return changed
