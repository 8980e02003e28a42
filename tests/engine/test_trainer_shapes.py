# Copyright (c) the d2_memfit developers.
"""Trainers of every shape on two ranks that are not alike: none hangs, and all agree."""

import functools

import pytest
import torch
from trainer_shapes import PROJECTS, train

SPLIT = {"SOLVER.ACCUMULATION_STEPS": 2, "MEMFIT.OOM.POLICY": "split"}
THREE = ["past DefaultTrainer", "another checkpointer on rank 0", "SimpleTrainer"]


@pytest.fixture(scope="module")
def straight(two_ranks, tmp_path_factory):
    """The outcomes of a run that nothing disturbs or ends, by the shape of its trainer."""

    @functools.cache
    def run(shape):
        keys = {} if shape == "own run_step" else SPLIT
        return two_ranks.run(train, shape, tmp_path_factory.mktemp("straight"), keys)

    return run


def same_on_all_ranks(outcomes):
    for other in outcomes[1:]:
        torch.testing.assert_close(other, outcomes[0], rtol=0, atol=0)
    return outcomes[0]


@pytest.mark.parametrize("shape", PROJECTS)
def test_with_default_keys_it_trains_as_without_d2_memfit(shape, two_ranks, tmp_path):
    actual = same_on_all_ranks(two_ranks.run(train, shape, tmp_path / "ours", {}))
    expected = two_ranks.run(train, f"plain {shape}", tmp_path / "plain", {})
    torch.testing.assert_close(actual, expected[0], rtol=0, atol=0)


@pytest.mark.parametrize(("shape", "phase"), zip(THREE, ("forward", "criterion", "backward")))
def test_errors_on_one_rank_change_nothing(shape, phase, two_ranks, straight, tmp_path):
    failed = same_on_all_ranks(two_ranks.run(train, shape, tmp_path, SPLIT, phase))
    torch.testing.assert_close(failed, same_on_all_ranks(straight(shape)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [*THREE, "own run_step"])
def test_a_resumed_run_ends_as_one_that_was_not(shape, two_ranks, straight, tmp_path):
    keys = {} if shape == "own run_step" else SPLIT
    two_ranks.run(train, shape, tmp_path, keys, "", 0, 2)
    resumed = two_ranks.run(train, shape, tmp_path, keys, "", 2, 4)
    torch.testing.assert_close(resumed, straight(shape), rtol=0, atol=0)
