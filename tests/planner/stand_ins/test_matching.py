# Copyright (c) the d2_memfit developers.
"""Hungarian matching on values that a dry run invents."""

import pytest
import torch
from torch import nn

from d2_memfit.planner.dry_run import DryRun
from d2_memfit.planner.stand_ins import fast_matching

optimize = pytest.importorskip("scipy.optimize")
linear_sum_assignment = optimize.linear_sum_assignment  # as matchers import it


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), 0.0])
def test_it_takes_any_match_whatever_the_costs_are(cost):
    model = nn.Linear(2, 2)
    costs = torch.full((300, 100), cost)
    with fast_matching(model, DryRun(model)):
        for assign in (linear_sum_assignment, optimize.linear_sum_assignment):
            queries, objects = map(torch.as_tensor, assign(costs))
            assert queries.unique().shape == objects.unique().shape == (100,)
            assert queries.dtype == torch.int64
    assert linear_sum_assignment([[2, 1], [1, 2]])[1].tolist() == [1, 0]
