# Copyright (c) the d2_memfit developers.
"""Saved random states."""

import io
import random

import numpy as np
import pytest
import torch

from d2_memfit.common.side_work import RandomState


def draw():
    return random.random(), float(np.random.rand()), np.random.randn(), float(torch.rand(()))


def test_a_checkpoint_can_hold_it_and_the_same_numbers_are_drawn_again_and_again():
    np.random.randn()  # the second of a pair waits
    file = io.BytesIO()
    torch.save(RandomState().states, file)
    drawn = draw()
    file.seek(0)
    state = RandomState(states=torch.load(file, weights_only=True))
    for _ in range(2):
        state.restore()
        assert draw() == drawn


@pytest.mark.parametrize("draws", [random.random, np.random.rand, lambda: torch.rand(())])
def test_states_are_compared(draws):
    state = RandomState()
    assert state.draws_the_same(RandomState())
    draws()
    assert not state.draws_the_same(RandomState())
