# Copyright (c) the d2_memfit developers.
"""Settings: what a run is told, checked in one place, in the words of whoever wrote it."""

import pytest
import torch
from lazy_configs import lazy_config
from tiny import tiny_cfg

from d2_memfit.common.errors import ConfigError, one_line
from d2_memfit.config.load import get_cfg, with_settings
from d2_memfit.config.settings import (
    NormalizerOptions,
    RecoveryOptions,
    check_settings,
    checked_cfg,
)
from d2_memfit.engine.train_loop import AccumulatingTrainer
from d2_memfit.job import Job


def pieces(**arguments):
    return Job(model=lambda: torch.nn.Linear(1, 1), optimizer=torch.optim.Adam, **arguments)


def trainer(**arguments):
    model = torch.nn.Linear(1, 1)
    return AccumulatingTrainer(model, [], torch.optim.SGD(model.parameters(), 0.1), **arguments)


def of_cfg(**keys):
    settings = {key.replace("__", "."): value for key, value in keys.items()}
    return Job.from_cfg(with_settings(get_cfg(), settings))


def of_lazy(**train):
    return Job.from_lazy(lazy_config(**train))


STEPS, SIZE, POLICY = "SOLVER.ACCUMULATION_STEPS", "MEMFIT.MICRO_BATCH", "MEMFIT.OOM.POLICY"
WAYS = {
    "yacs": (
        lambda: of_cfg(SOLVER__ACCUMULATION_STEPS=0, MEMFIT__MICRO_BATCH=1.5),
        [SIZE, STEPS],
    ),
    "LazyConfig": (
        lambda: of_lazy(accumulation_steps=0, memfit={"micro_batch": 1.5}),
        [SIZE, STEPS],
    ),
    "a Job of pieces": (
        lambda: pieces(accumulation_steps=0, micro_batch_size=1.5),
        [SIZE, STEPS],
    ),
    "a trainer": (
        lambda: trainer(accumulation_steps=0, micro_batch_size=1.5),
        [SIZE, STEPS],
    ),
    "nodes of a Job": (
        lambda: pieces(memfit={"oom": {"policy": "wait"}, "heads": {"chunk_size": 1.5}}),
        ["MEMFIT.HEADS.CHUNK_SIZE", POLICY],
    ),
    "an unknown key of a Job": (
        lambda: pieces(memfit={"oom": {"last_resor": "skip"}}),
        ["MEMFIT.OOM.LAST_RESOR"],
    ),
    "options": (lambda: RecoveryOptions(last_resort="x"), ["MEMFIT.OOM.LAST_RESORT"]),
    "values and keys of a LazyConfig": (
        lambda: of_lazy(max_iter=10**12, memfit={"oom": {"x": 1}, "micro_batch": 1.5}),
        [SIZE, "SOLVER.MAX_ITER", "MEMFIT.OOM.X"],
    ),
    "relations": (lambda: of_lazy(memfit={"plan": {"enabled": True}}), ["MEMFIT.PLAN.ENABLED"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_all_that_is_wrong_comes_at_once_in_the_words_of_the_user(prose, way):
    make, keys = WAYS[way]
    with pytest.raises(ConfigError) as e:
        make()
    lines = sorted(one_line(e.value).split("\n"))
    assert len(lines) == len(keys)
    assert all(key in line for key, line in zip(keys, lines))
    prose("\n".join(lines))


def test_a_wrong_value_hides_only_what_depends_on_it():
    cfg = get_cfg()
    cfg.SOLVER.IMS_PER_BATCH, cfg.MEMFIT.BUDGET_GB, cfg.MEMFIT.PLAN.ENABLED = -1, -1, True
    cfg.DATALOADER.NUM_WORKERS = True  # which is no number
    with pytest.raises(ConfigError) as e:
        check_settings(cfg, 3)
    assert [line.split()[0] for line in str(e.value).split("\n")] == [
        "SOLVER.IMS_PER_BATCH",
        "DATALOADER.NUM_WORKERS",
        "MEMFIT.BUDGET_GB",
    ]


def test_what_is_parsed_has_types_and_is_made_once():
    cfg = tiny_cfg()
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.ACCUMULATION_STEPS = 4, 3
    cfg.MEMFIT.OOM.POLICY, cfg.MEMFIT.OOM.LAST_RESORT = "split", "skip"
    cfg.MEMFIT.NORMALIZERS.LOSSES = [["loss_mask*", "objects"], ["loss_total", "sum"]]
    job = Job.from_cfg(cfg, 2)
    assert (job.images_per_batch, job.window) == (2, 6)
    assert RecoveryOptions.from_cfg(job.cfg).last_resort == "skip"
    assert list(NormalizerOptions.from_cfg(job.cfg).losses[1]) == ["loss_total", "sum"]
    assert job.with_settings({"MEMFIT.MICRO_BATCH": 1}).largest_micro_batch == 1
    assert not cfg.is_frozen()
    other = job.with_settings({"MEMFIT.OOM.POLICY": "raise"})
    assert RecoveryOptions.from_cfg(other.cfg) is None
    assert job.cfg.MEMFIT.OOM.POLICY == "split"


def test_an_evaluation_does_not_read_the_keys_of_training():
    cfg = get_cfg()
    cfg.SOLVER.MAX_ITER, cfg.SOLVER.IMS_PER_BATCH = 0, 3
    assert RecoveryOptions.from_cfg(checked_cfg(cfg, 2, trains=False)) is None
    cfg.MEMFIT.OOM.POLICY = "never"
    with pytest.raises(ConfigError, match=POLICY):
        checked_cfg(cfg, 2, trains=False)


def test_only_counts_that_are_known_divide_losses(prose):
    assert NormalizerOptions(losses=[["*", "sum"]]).losses == [["*", "sum"]]
    with pytest.raises(ConfigError, match=r"MEMFIT\.NORMALIZERS\.LOSSES") as e:
        NormalizerOptions(losses=[["a", "x"]])
    prose(str(e.value))
