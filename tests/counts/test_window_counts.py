# Copyright (c) the d2_memfit developers.
"""Counts where no trainer answers them."""

import pytest
import torch

from d2_memfit.counts import mean_factor, window_count, window_share

pytestmark = pytest.mark.slow


def count_on_rank(rank, counts, is_tensor):
    own = torch.tensor(counts[rank]) if is_tensor else counts[rank]
    return float(window_count(own, minimum=2.0)), float(own)


@pytest.mark.parametrize("is_tensor", [False, True])
def test_a_count_is_the_mean_over_ranks_and_not_below_the_minimum(two_ranks, is_tensor):
    assert two_ranks.run(count_on_rank, (1, 5), is_tensor) == [(3.0, 1.0), (3.0, 5.0)]
    assert two_ranks.run(count_on_rank, (1, 2), is_tensor) == [(2.0, 1.0), (2.0, 2.0)]
    assert [count_on_rank(0, (n,), is_tensor)[0] for n in (0, 7)] == [2.0, 7.0]


def test_means_and_shares_are_of_the_batch():
    assert (mean_factor(torch.tensor(5)), window_share()) == (1.0, 1.0)
