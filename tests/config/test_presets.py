# Copyright (c) the d2_memfit developers.
"""Budgets by the size of a card, and by what is free."""

import pytest

from d2_memfit import get_cfg
from d2_memfit.config.cards import PRESETS, why_no_card_has
from d2_memfit.config.load import load_cfg
from d2_memfit.config.settings import checked_cfg
from d2_memfit.memory import process_memory


@pytest.mark.parametrize(("budget", "card"), [(6, "6GB"), (5.9, "6GB"), (8, "8GB"), (24, "24GB")])
def test_what_no_card_of_its_size_has_is_answered_with_the_card(budget, card):
    assert f"of a card that is sold as {card}. To plan for such a card: --card {card}" in (
        why_no_card_has(budget)
    )
    assert why_no_card_has(budget + 1) is None


def test_a_named_budget_goes_before_that_of_a_card():
    cfg = get_cfg()
    assert checked_cfg(cfg, 1).MEMFIT.BUDGET_GB is None
    cfg.MEMFIT.PRESET = "6GB"
    assert PRESETS["6GB"] == checked_cfg(cfg, 1).MEMFIT.BUDGET_GB
    cfg.MEMFIT.BUDGET_GB = 3
    assert checked_cfg(cfg, 1).MEMFIT.BUDGET_GB == 3


def test_auto_is_measured_and_leaves_room_for_the_workers_of_the_loader(log):
    cfg = get_cfg()
    cfg.MODEL.DEVICE, cfg.MEMFIT.BUDGET_GB = "cpu", "auto"
    cfg.DATALOADER.NUM_WORKERS = 0
    alone = checked_cfg(cfg, 1).MEMFIT.BUDGET_GB
    assert alone > process_memory().data_bytes / 2**30
    assert "MEMFIT.BUDGET_GB auto on the device cpu: " in log.text
    cfg.DATALOADER.NUM_WORKERS = 4
    assert alone - 1 > checked_cfg(cfg, 1).MEMFIT.BUDGET_GB


def test_a_preset_of_the_command_line_takes_the_place_of_a_files_budget(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("MEMFIT: {BUDGET_GB: 10}\nVERSION: 2\n")
    cfg = load_cfg(str(file), ["MEMFIT.PRESET", "6GB"])
    assert checked_cfg(cfg, 1).MEMFIT.BUDGET_GB == 5.5
    assert checked_cfg(load_cfg(str(file)), 1).MEMFIT.BUDGET_GB == 10
