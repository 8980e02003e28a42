# Copyright (c) the d2_memfit developers.
"""What a snapshot puts back."""

import random

import numpy as np
import pytest
import torch
from tiny import tiny_cfg, tiny_model

from d2_memfit.engine.state import Snapshot


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: float(np.random.rand()), lambda: float(torch.rand(()))],
    ids=["Python", "NumPy", "PyTorch"],
)
def test_random_numbers_are_drawn_again(draw):
    snapshot = Snapshot(tiny_model(tiny_cfg("proposal_network")))
    drawn = [draw() for _ in range(3)]
    for _ in range(2):
        snapshot.restore()
        assert [draw() for _ in range(3)] == drawn


def test_running_statistics_and_numbers_of_modules_are_as_before():
    module = torch.nn.BatchNorm1d(2)
    module.normaliser = 100
    snapshot = Snapshot(module)
    module(torch.randn(8, 2))
    module.normaliser, module.counter = 3.5, 1
    snapshot.restore()
    assert module.running_mean.tolist() == [0, 0]
    assert module.num_batches_tracked == 0
    assert module.normaliser == 100
    assert not hasattr(module, "counter")
