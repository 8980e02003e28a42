"""A run that was interrupted goes on as if nothing had happened."""

import pytest
import torch
from resumed import coins_cfg, train, train_on_rank

pytestmark = pytest.mark.slow

OF_ONE_RANK = {
    "no workers": {},
    "2 workers": {"DATALOADER.NUM_WORKERS": 2},
    "3 workers, not grouped": {
        "DATALOADER.NUM_WORKERS": 3,
        "DATALOADER.ASPECT_RATIO_GROUPING": False,
    },
    "not grouped": {"DATALOADER.ASPECT_RATIO_GROUPING": False},
    "float16": {"SOLVER.AMP.ENABLED": True},
    "bfloat16": {"SOLVER.AMP.ENABLED": True, "MEMFIT.AMP_DTYPE": "bfloat16"},
    "repeat factors": {
        "DATALOADER.SAMPLER_TRAIN": "RepeatFactorTrainingSampler",
        "DATALOADER.REPEAT_THRESHOLD": 2.0,
    },
    "random subset": {"DATALOADER.SAMPLER_TRAIN": "RandomSubsetTrainingSampler"},
    "micro-batches": {"MEMFIT.MICRO_BATCH": 4, "MEMFIT.OOM.POLICY": "split"},
    "shared dataset": {"MEMFIT.HOST.SHARED_DATASET": True},
}


def check_equal(straight, first, second):
    assert first["images"] + second["images"] == straight["images"]
    assert first["losses"] + second["losses"] == straight["losses"]
    expected, actual = straight["weights"], second["weights"]
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.parametrize("keys", OF_ONE_RANK.values(), ids=OF_ONE_RANK)
def test_12_iterations_are_5_and_7(coins, tmp_path, keys):
    straight = train(coins_cfg(tmp_path / "straight", "faster_rcnn", **keys), 0, 12)
    cfg = coins_cfg(tmp_path / "resumed", "faster_rcnn", **keys)
    check_equal(straight, train(cfg, 0, 5), train(cfg, 5, 12))


@pytest.mark.parametrize("family", ["mask_rcnn", "retinanet"])
def test_other_models_too(coins, tmp_path, family):
    """RetinaNet has a running normaliser, which is a plain number."""
    straight = train(coins_cfg(tmp_path / "straight", family), 0, 12)
    cfg = coins_cfg(tmp_path / "resumed", family)
    check_equal(straight, train(cfg, 0, 5), train(cfg, 5, 12))


OF_TWO_RANKS = {
    "2 workers": {"DATALOADER.NUM_WORKERS": 2},
    "float16": {"SOLVER.AMP.ENABLED": True},
    "split": {"MEMFIT.OOM.POLICY": "split"},
    "sharded optimizer": {"MEMFIT.OPTIMIZER.ZERO": True},
}


@pytest.mark.parametrize("keys", OF_TWO_RANKS.values(), ids=OF_TWO_RANKS)
def test_on_two_ranks_too(coins, tmp_path, two_ranks, keys):
    keys = {"SOLVER.IMS_PER_BATCH": 4, **keys}
    cfg = coins_cfg(tmp_path / "straight", "faster_rcnn", **keys)
    straight = two_ranks.run(train_on_rank, coins, cfg, 0, 12)
    cfg = coins_cfg(tmp_path / "resumed", "faster_rcnn", **keys)
    first = two_ranks.run(train_on_rank, coins, cfg, 0, 5)
    second = two_ranks.run(train_on_rank, coins, cfg, 5, 12)
    assert straight[0]["images"] != straight[1]["images"]
    for results in zip(straight, first, second):
        check_equal(*results)
