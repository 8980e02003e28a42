# Copyright (c) the d2_memfit developers.
import psutil
import pytest
from tiny import tiny_cfg

from d2_memfit.engine.build import build_trainer
from d2_memfit.errors import ConfigError
from d2_memfit.job import Job
from d2_memfit.techniques import apply_techniques, host_budget

GB = 2**30


def plan(budget_gb, workers=8, log=None):
    """The config that comes out."""
    cfg = tiny_cfg(fpn=False)
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (800,), 1333
    cfg.DATALOADER.NUM_WORKERS = workers
    cfg.MEMFIT.HOST.BUDGET_GB = budget_gb
    cfg.freeze()
    return apply_techniques("config", cfg, cfg)


def own_gb():
    return psutil.Process().memory_info().rss / GB


def test_workers_are_as_many_as_fit(log):
    assert plan(own_gb() + 10).DATALOADER.NUM_WORKERS == 8
    cfg = plan(own_gb() + 1.0)
    assert 1 <= cfg.DATALOADER.NUM_WORKERS <= 3
    assert f"DATALOADER.NUM_WORKERS {cfg.DATALOADER.NUM_WORKERS} of 8" in log.text
    assert cfg.is_frozen()


def test_there_are_none_where_none_fits():
    assert plan(own_gb() / 2).DATALOADER.NUM_WORKERS == 0


def test_what_the_machine_has_counts_too(monkeypatch):
    monkeypatch.setattr(host_budget, "available_host_bytes", lambda: 0.7 * GB)
    assert 1 <= plan(1000).DATALOADER.NUM_WORKERS <= 2


def test_a_trainer_decides_once(coins, log):
    cfg = tiny_cfg(fpn=False)
    cfg.DATASETS.TRAIN, cfg.DATALOADER.NUM_WORKERS = ("coins_train",), 8
    cfg.MEMFIT.HOST.BUDGET_GB = own_gb() / 2
    loader = build_trainer(Job.from_cfg(cfg)).data_loader
    assert log.text.count("DATALOADER.NUM_WORKERS 0 of 8") == 1
    assert getattr(loader, "dataset", loader).num_workers == 0


@pytest.mark.parametrize("value", [0, -1, "8 gigs", True])
def test_a_budget_that_cannot_work_is_an_error(value):
    with pytest.raises(
        ConfigError, match=f"HOST.BUDGET_GB must be a positive number, got {value!r}"
    ):
        plan(value)
