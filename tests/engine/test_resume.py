# Copyright (c) the d2_memfit developers.
"""A run that was interrupted goes on as if nothing had happened."""

import shutil

import numpy as np
import pytest
import torch
from detectron2.engine import hooks
from resumed import Trainer, coins_cfg, train, train_on_rank

# On many CPUs iterations in 16 bits take ten times as long: one micro-batch is enough for them.
HALF = {"SOLVER.AMP.ENABLED": True, "SOLVER.ACCUMULATION_STEPS": 1}

OF_ONE_RANK = {
    "no workers": {},
    "2 workers": {"DATALOADER.NUM_WORKERS": 2},
    "3 workers, not grouped": {
        "DATALOADER.NUM_WORKERS": 3,
        "DATALOADER.ASPECT_RATIO_GROUPING": False,
    },
    "not grouped": {"DATALOADER.ASPECT_RATIO_GROUPING": False},
    "bfloat16": {**HALF, "MEMFIT.AMP_DTYPE": "bfloat16"},
    "repeat factors": {
        "DATALOADER.SAMPLER_TRAIN": "RepeatFactorTrainingSampler",
        "DATALOADER.REPEAT_THRESHOLD": 2.0,
    },
    "random subset": {"DATALOADER.SAMPLER_TRAIN": "RandomSubsetTrainingSampler"},
    "micro-batches": {"MEMFIT.MICRO_BATCH": 4, "MEMFIT.OOM.POLICY": "split"},
    "shared dataset": {"MEMFIT.HOST.SHARED_DATASET": True},
}


# A CPU computes float16 slowly. test_defaults.py resumes a run with a loss scale, too.
FLOAT16 = pytest.param(HALF, marks=pytest.mark.sweep, id="float16")


def check_equal(straight, first, second):
    assert first["images"] + second["images"] == straight["images"]
    assert first["losses"] + second["losses"] == straight["losses"]
    expected, actual = straight["weights"], second["weights"]
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def small_cfg(output_dir, family="proposal_network", **keys):
    """Five iterations of 6 images of 16: an epoch ends after the run was resumed."""
    cfg = coins_cfg(output_dir, family, **{"SOLVER.MAX_ITER": 5, **keys})
    cfg.DATASETS.TRAIN = ("coins_val",)
    return cfg


@pytest.mark.parametrize(
    "keys", [*(pytest.param(keys, id=name) for name, keys in OF_ONE_RANK.items()), FLOAT16]
)
def test_5_iterations_are_2_and_3(coins, tmp_path, keys):
    straight = train(small_cfg(tmp_path / "straight", **keys), 0, 5)
    cfg = small_cfg(tmp_path / "resumed", **keys)
    check_equal(straight, train(cfg, 0, 2), train(cfg, 2, 5))


def test_random_numbers_that_are_drawn_between_the_load_and_the_first_iteration_do_not_count(
    coins, tmp_path
):
    class Drawing(Trainer):
        def build_hooks(self):
            draw = hooks.CallbackHook(before_train=lambda _: (torch.rand(1), np.random.rand()))
            return [draw, *super().build_hooks()]

    straight = train(small_cfg(tmp_path / "straight"), 0, 4, Drawing)
    cfg = small_cfg(tmp_path / "resumed")
    check_equal(straight, train(cfg, 0, 2, Drawing), train(cfg, 2, 4, Drawing))


@pytest.mark.parametrize("family", ["mask_rcnn", "retinanet"])
def test_other_models_too(coins, tmp_path, family):
    """RetinaNet has a running normaliser, which is a plain number."""
    keys = {"MEMFIT.NORMALIZERS.POLICY": "window"}
    train(small_cfg(tmp_path / "warm up", family), 0, 1)  # a process's first sums may be others
    straight = train(small_cfg(tmp_path / "straight", family, **keys), 0, 5)
    cfg = small_cfg(tmp_path / "resumed", family, **keys)
    check_equal(straight, train(cfg, 0, 2), train(cfg, 2, 5))


OF_TWO_RANKS = {
    "2 workers": {"DATALOADER.NUM_WORKERS": 2, "SOLVER.ACCUMULATION_STEPS": 1},
    "split": {"MEMFIT.OOM.POLICY": "split"},
    "sharded optimizer": {"MEMFIT.OPTIMIZER.ZERO": True, "SOLVER.ACCUMULATION_STEPS": 1},
}


@pytest.mark.parametrize(
    "keys", [*(pytest.param(keys, id=name) for name, keys in OF_TWO_RANKS.items()), FLOAT16]
)
def test_on_two_ranks_too(coins, tmp_path, two_ranks, keys):
    keys = {"SOLVER.IMS_PER_BATCH": 4, **keys}
    cfg = small_cfg(tmp_path / "straight", **keys)
    straight = two_ranks.run(train_on_rank, coins, cfg, 0, 5)
    cfg = small_cfg(tmp_path / "resumed", **keys)
    first = two_ranks.run(train_on_rank, coins, cfg, 0, 2)
    second = two_ranks.run(train_on_rank, coins, cfg, 2, 5)
    assert straight[0]["images"] != straight[1]["images"]
    for results in zip(straight, first, second):
        check_equal(*results)


def test_on_another_number_of_ranks_the_data_continue(coins, tmp_path, two_ranks):
    cfg = coins_cfg(tmp_path / "first", "proposal_network", **{"SOLVER.IMS_PER_BATCH": 4})
    first = two_ranks.run(train_on_rank, coins, cfg, 0, 5)
    shutil.copytree(tmp_path / "first", tmp_path / "second")  # the ranks have locked the first
    cfg.SOLVER.IMS_PER_BATCH, cfg.OUTPUT_DIR = 2, str(tmp_path / "second")
    second = train(cfg, 5, 7)
    of_two_ranks = {name for rank in first for images in rank["images"] for name, _ in images}
    assert len(of_two_ranks) == 60  # of 64; grouping keeps some back
    assert {name for name, _ in second["images"][0]} - of_two_ranks


def test_a_loader_that_is_not_known_begins_again_and_it_is_said(coins, tmp_path, log):
    class OwnLoader(Trainer):
        @classmethod
        def build_train_loader(cls, cfg):
            return iter(super().build_train_loader(cfg))

    cfg = small_cfg(tmp_path)
    train(cfg, 0, 2, OwnLoader)
    train(cfg, 2, 3, OwnLoader)
    train(cfg, 3, 4)
    assert log.text.count("The order of the data starts from the beginning: it needs") == 2
