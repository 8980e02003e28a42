# Copyright (c) the d2_memfit developers.
"""Plans as part of a run."""

from importlib import import_module

import pytest
from tiny import tiny_cfg

from d2_memfit import fit_config
from d2_memfit.common.errors import ConfigError, MemfitError
from d2_memfit.config import settings
from d2_memfit.config.load import load_cfg, with_settings
from d2_memfit.memory import process_memory

GB = 2**30


@pytest.fixture
def cfg(tmp_path):
    cfg = tiny_cfg("proposal_network", fpn=False)
    cfg.DATASETS.TEST = ()
    cfg.SOLVER.IMS_PER_BATCH = 4
    cfg.MEMFIT.PLAN.ENABLED = True
    cfg.OUTPUT_DIR = str(tmp_path / "output")
    return cfg


def test_without_a_plan_the_config_is_the_same_object(cfg):
    cfg.MEMFIT.PLAN.ENABLED = False
    assert fit_config(cfg) is cfg


def test_a_plan_is_written_down_and_taken_again_when_a_run_is_resumed(cfg, tmp_path, log):
    cfg.MEMFIT.BUDGET_GB = process_memory().data_bytes / GB + 20
    cfg.freeze()
    planned = fit_config(cfg)
    assert planned.is_frozen()
    assert planned.MEMFIT.OOM.POLICY == "split"
    assert not planned.MEMFIT.PLAN.ENABLED
    file = tmp_path / "output" / "memfit_plan.yaml"
    assert load_cfg(str(file)).dump() == planned.dump()
    assert "Plan for MEMFIT.BUDGET_GB" in log.text
    log.clear()
    assert fit_config(cfg) == planned
    assert f"The plan is read from {file}" in log.text
    copied = with_settings(cfg, {"OUTPUT_DIR": str(tmp_path / "copied")})
    file.parent.rename(copied.OUTPUT_DIR)
    assert fit_config(copied).OUTPUT_DIR == copied.OUTPUT_DIR
    other = cfg.clone()
    other.defrost()
    other.SOLVER.IMS_PER_BATCH = 2
    assert fit_config(other).SOLVER.IMS_PER_BATCH == 2
    assert "Plan for MEMFIT.BUDGET_GB" in log.text


def test_a_file_of_the_user_with_the_name_of_a_plan_stays(cfg, tmp_path):
    cfg.MEMFIT.BUDGET_GB = process_memory().data_bytes / GB + 20
    file = tmp_path / "output" / "memfit_plan.yaml"
    file.parent.mkdir()
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"memfit_plan\.yaml exists"):
        fit_config(cfg)
    assert file.read_text() == "mine"


def test_a_preset_is_a_budget(cfg):
    cfg.MEMFIT.PRESET = "24GB"
    assert fit_config(cfg).MEMFIT.BUDGET_GB == 21.8


def test_what_is_free_is_planned_for_and_a_plan_for_more_is_not_taken_again(cfg, monkeypatch, log):
    cfg.MEMFIT.BUDGET_GB = "auto"
    free = [8.0]
    monkeypatch.setattr(settings, "auto_budget_gb", lambda *_: free[0])
    assert fit_config(cfg).MEMFIT.BUDGET_GB == 8
    free[0] = 7.8  # about as much
    assert fit_config(cfg).MEMFIT.BUDGET_GB == 8
    free[0] = 5
    assert fit_config(cfg).MEMFIT.BUDGET_GB == 5
    assert "5.00 GB are free, but " in log.text
    free[0] = 9
    assert fit_config(cfg).MEMFIT.BUDGET_GB == 5


def plan_on_ranks(rank, output_dir, what_fails):
    """The budget that each rank plans for, or the error that it ends with."""
    cfg = tiny_cfg("proposal_network", fpn=False)
    cfg.OUTPUT_DIR = output_dir
    cfg.DATASETS.TEST = ()
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.MEMFIT.PLAN.ENABLED, cfg.MEMFIT.BUDGET_GB = True, "auto"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "auto_budget_gb", lambda *_: 8.0 - 2 * rank)
        if what_fails == "planning" and rank == 0:
            patch.setattr(
                import_module("d2_memfit.planner.fit_config"), "plan_memory", lambda *_, **__: 1 / 0
            )
        if what_fails == "measuring" and rank == 1:
            patch.setattr(settings, "auto_budget_gb", lambda *_: 1 / 0)
        try:
            return fit_config(cfg).MEMFIT.BUDGET_GB
        except (MemfitError, ZeroDivisionError) as e:
            return f"{type(e).__name__}: {e}"


def test_ranks_plan_for_the_one_that_has_least(two_ranks, tmp_path):
    assert two_ranks.run(plan_on_ranks, str(tmp_path), "") == [6, 6]


@pytest.mark.parametrize(("what_fails", "rank"), [("planning", 0), ("measuring", 1)])
def test_an_error_of_any_kind_on_one_rank_ends_all(two_ranks, tmp_path, what_fails, rank):
    outcomes = two_ranks.run(plan_on_ranks, str(tmp_path), what_fails)
    assert outcomes[rank] == "ZeroDivisionError: division by zero"
    assert outcomes[1 - rank] == (
        f"MemfitError: rank {rank} has no plan: ZeroDivisionError: division by zero"
    )


def test_what_does_not_fit_is_an_error_with_the_smallest_budget(cfg, tmp_path):
    cfg.SOLVER.IMS_PER_BATCH = 1
    cfg.MEMFIT.BUDGET_GB = 0.3
    cfg.MEMFIT.PLAN.ALLOW = ["exact"]
    with pytest.raises(ConfigError, match=r"MEMFIT.BUDGET_GB 0.3: Does not fit: .* In the way: "):
        fit_config(cfg)
    assert not (tmp_path / "output" / "memfit_plan.yaml").exists()
