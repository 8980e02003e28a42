# Copyright (c) the d2_memfit developers.
import torch

from d2_memfit.memory import TensorMeter


def test_what_comes_to_life_counts_until_it_is_freed():
    with TensorMeter() as meter:
        a = torch.zeros(1000)
        assert meter.live_bytes == 4000
        b = a + 1
        assert meter.live_bytes == 8000
        del a
        assert meter.live_bytes == 4000
    del b
    assert meter.live_bytes == 0
    assert meter.peak_bytes == 8000


def test_views_and_operators_in_place_cost_nothing():
    with TensorMeter() as meter:
        a = torch.zeros(10, 100)
        view = a.t()[3:].reshape(-1, 10)[0]
        a.add_(1).relu_()
        del a
        assert meter.live_bytes == 4000  # the view keeps all of it
        del view
        assert meter.live_bytes == 0
