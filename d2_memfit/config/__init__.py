# Copyright (c) the d2_memfit developers.
"""Config keys, config files and presets."""

from .cards import CARDS, card_name, preset_of_card
from .config import (
    add_memfit_config,
    cfg_of_techniques,
    check_config,
    check_plan,
    get_cfg,
    load_cfg,
    with_memfit_keys,
    with_settings,
    without_memfit_keys,
)
from .detectron2_keys import check_detectron2_keys
from .files import OUR_ZOO, find_config_file, keys_in_own_files
from .keys import default_keys, keys_of
from .presets import PRESETS, budget_of_preset, why_no_card_has, with_budget

__all__ = [
    "CARDS",
    "OUR_ZOO",
    "PRESETS",
    "add_memfit_config",
    "budget_of_preset",
    "card_name",
    "cfg_of_techniques",
    "check_config",
    "check_detectron2_keys",
    "check_plan",
    "default_keys",
    "find_config_file",
    "get_cfg",
    "keys_in_own_files",
    "keys_of",
    "load_cfg",
    "preset_of_card",
    "why_no_card_has",
    "with_budget",
    "with_memfit_keys",
    "with_settings",
    "without_memfit_keys",
]
