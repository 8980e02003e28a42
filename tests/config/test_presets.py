# Copyright (c) the d2_memfit developers.
"""Budgets by the size of a card, and by what is free."""

import pytest

from d2_memfit import get_cfg
from d2_memfit.cli.options import opts_of_budget
from d2_memfit.config.cards import PRESETS, why_no_card_has
from d2_memfit.config.load import load_cfg, with_settings
from d2_memfit.config.settings import Settings, check_settings
from d2_memfit.errors import ConfigError
from d2_memfit.memory import process_memory


def test_there_is_no_other_size():
    assert all(why_no_card_has(budget_gb) is None for budget_gb in PRESETS.values())
    with pytest.raises(ConfigError, match=r"MEMFIT\.PRESET must be 4GB, 5GB, 6GB, .*, got '7GB'"):
        check_settings(with_settings(get_cfg(), {"MEMFIT.PRESET": "7GB"}))


@pytest.mark.parametrize(("budget", "card"), [(6, "6GB"), (5.9, "6GB"), (8, "8GB"), (24, "24GB")])
def test_what_no_card_of_its_size_has_is_answered_with_the_card(budget, card):
    assert f"of a card that is sold as {card}. To plan for such a card: --card {card}" in (
        why_no_card_has(budget)
    )
    assert why_no_card_has(budget + 1) is None


def test_a_named_budget_goes_before_that_of_a_card():
    cfg = get_cfg()
    assert Settings.from_cfg(cfg, 1).cfg.MEMFIT.BUDGET_GB is None
    cfg.MEMFIT.PRESET = "6GB"
    assert PRESETS["6GB"] == Settings.from_cfg(cfg, 1).cfg.MEMFIT.BUDGET_GB
    cfg.MEMFIT.BUDGET_GB = 3
    assert Settings.from_cfg(cfg, 1).cfg.MEMFIT.BUDGET_GB == 3


def test_auto_is_measured_and_leaves_room_for_the_workers_of_the_loader(log):
    cfg = get_cfg()
    cfg.MODEL.DEVICE, cfg.MEMFIT.BUDGET_GB = "cpu", "auto"
    cfg.DATALOADER.NUM_WORKERS = 0
    alone = Settings.from_cfg(cfg, 1).cfg.MEMFIT.BUDGET_GB
    assert alone > process_memory().data_bytes / 2**30
    assert "MEMFIT.BUDGET_GB auto on the device cpu: " in log.text
    cfg.DATALOADER.NUM_WORKERS = 4
    assert alone - 1 > Settings.from_cfg(cfg, 1).cfg.MEMFIT.BUDGET_GB


def test_a_preset_of_the_command_line_takes_the_place_of_a_files_budget(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("MEMFIT: {BUDGET_GB: 10}\nVERSION: 2\n")
    cfg = load_cfg(str(file), ["MEMFIT.PRESET", "6GB"])
    assert Settings.from_cfg(cfg, 1).cfg.MEMFIT.BUDGET_GB == 5.5
    assert Settings.from_cfg(load_cfg(str(file)), 1).cfg.MEMFIT.BUDGET_GB == 10


@pytest.mark.parametrize("card", ["6GB", "6", " 6 gb ", "6G", "6GiB"])
def test_a_card_may_be_written_in_ways(card):
    assert opts_of_budget(card, None, [])[:2] == ["MEMFIT.PRESET", "6GB"]
