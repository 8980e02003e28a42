# Copyright (c) the d2_memfit developers.
"""What a copy of the state puts back."""

import random

import numpy as np
import pytest
import torch
from detectron2.utils.events import EventStorage
from tiny import parameters, tiny_cfg, tiny_model

from d2_memfit.engine.state import StateCopy, watched
from d2_memfit.engine.storage import WindowStorage


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: float(np.random.rand()), lambda: float(torch.rand(()))],
    ids=["Python", "NumPy", "PyTorch"],
)
def test_random_numbers_are_drawn_again(draw):
    copy = StateCopy(tiny_model(tiny_cfg("proposal_network")))
    drawn = [draw() for _ in range(3)]
    for _ in range(2):
        copy.restore()
        assert [draw() for _ in range(3)] == drawn


def test_running_statistics_and_numbers_of_modules_are_as_before():
    module = torch.nn.BatchNorm1d(2)
    module.normaliser = 100
    copy = StateCopy(module)
    module(torch.randn(8, 2))
    module.normaliser, module.counter = 3.5, 1
    copy.restore()
    assert module.running_mean.tolist() == [0, 0]
    assert module.num_batches_tracked == 0
    assert module.normaliser == 100
    assert not hasattr(module, "counter")


def test_scalars_of_the_window_are_as_before():
    with EventStorage() as storage, WindowStorage(storage) as window:
        window.put_scalar("loss", 1.0)
        copy = StateCopy(torch.nn.Linear(1, 1), window)
        for value in (5.0, 3.0):
            copy.restore()
            window.put_scalar("loss", value)
    window.write()
    assert storage.history("loss").values() == [(2.0, 0)]


class WithTeachers(torch.nn.Module):
    """Two frozen teachers, which follow in each forward."""

    def __init__(self):
        super().__init__()
        self.student = torch.nn.Linear(1, 1)
        self.teachers = torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(2))
        self.teachers.requires_grad_(False)

    def forward(self):
        for teacher in self.teachers:
            teacher.weight.mul_(0.5)


@pytest.mark.parametrize("forwards", [0, 1, 2])
def test_frozen_weights_that_a_forward_changes_are_as_before(forwards):
    model = WithTeachers()

    def forward():
        with watched(model, may_run_again=True):
            model()

    for _ in range(forwards):
        forward()
    before = parameters(model)
    copy = StateCopy(model)
    forward()
    assert not torch.equal(model.teachers[0].weight, before["teachers.0.weight"])
    copy.restore()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
