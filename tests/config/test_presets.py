# Copyright (c) the d2_memfit developers.
"""Budgets by the size of a card, and by what is free."""

import pytest

from d2_memfit import get_cfg, plan_memory
from d2_memfit.cli.options import opts_of_budget
from d2_memfit.config.cards import PRESETS, why_no_card_has
from d2_memfit.config.load import load_cfg, with_settings
from d2_memfit.config.settings import Settings, check_settings
from d2_memfit.errors import ConfigError
from d2_memfit.job import WorstCase
from d2_memfit.memory import process_memory

# What PyTorch says that the smallest card of each size has, in GB.
SMALLEST = {
    "4GB": 3.62,
    "5GB": 4.75,
    "6GB": 5.60,
    "8GB": 7.60,
    "10GB": 9.62,
    "11GB": 10.56,
    "12GB": 11.62,
    "16GB": 14.56,
    "24GB": 21.96,
    "32GB": 31.34,
    "40GB": 39.38,
    "48GB": 44.34,
    "80GB": 79.14,
}


@pytest.mark.parametrize("name", SMALLEST)
def test_a_process_can_take_the_budget_of_a_card_from_each_of_that_size(name):
    assert 0.05 < SMALLEST[name] - PRESETS[name] < 0.2
    assert why_no_card_has(PRESETS[name]) is None


def test_there_is_no_other_size():
    assert PRESETS.keys() == SMALLEST.keys()
    with pytest.raises(ConfigError, match=r"MEMFIT\.PRESET must be 4GB, 5GB, 6GB, .*, got '7GB'"):
        check_settings(with_settings(get_cfg(), {"MEMFIT.PRESET": "7GB"}))


@pytest.mark.parametrize(("budget", "card"), [(6, "6GB"), (5.9, "6GB"), (8, "8GB"), (24, "24GB")])
def test_what_no_card_of_its_size_has_is_answered_with_the_card(budget, card):
    assert f"of a card that is sold as {card}. To plan for such a card: --card {card}" in (
        why_no_card_has(budget)
    )


@pytest.mark.parametrize("budget", [0.5, 5.2, 7, 9, 20, 100])
def test_other_budgets_are_fine(budget):
    assert why_no_card_has(budget) is None


@pytest.mark.slow
def test_it_is_a_warning_where_it_is_planned(log):
    cfg = get_cfg()
    cfg.MODEL.META_ARCHITECTURE, cfg.SOLVER.IMS_PER_BATCH = "ProposalNetwork", 1
    cfg.DATASETS.TRAIN = ("coco_2017_train",)
    case = WorstCase((64, 64), 1)
    for device, expected in (("cuda", True), ("cpu", False)):
        log.clear()
        plan_memory(cfg, 6, device=device, batch=case)
        assert ("MEMFIT.BUDGET_GB 6: a process can take about 5.5 GB" in log.text) == expected


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
