# Copyright (c) the d2_memfit developers.
"""Matching in a dry run."""

import pytest
import torch
from detectron2.modeling.matcher import Matcher
from detectron2.structures import Boxes, pairwise_iou
from torch import nn

from d2_memfit.job import boxes_anywhere
from d2_memfit.planner.dry_run import DryRun
from d2_memfit.planner.matching import fast_matching
from d2_memfit.planner.meta import is_fake
from d2_memfit.techniques.crowds import pairwise_iou_in_chunks

optimize = pytest.importorskip("scipy.optimize")
linear_sum_assignment = optimize.linear_sum_assignment  # as matchers import it


@pytest.mark.parametrize("cost", [float("nan"), float("inf"), 0.0])
def test_it_takes_any_match_whatever_the_costs_are(cost):
    model = nn.Linear(2, 2)
    costs = torch.full((300, 100), cost)
    with fast_matching(model):
        for assign in (linear_sum_assignment, optimize.linear_sum_assignment):
            queries, objects = map(torch.as_tensor, assign(costs))
            assert queries.unique().shape == objects.unique().shape == (100,)
            assert queries.dtype == torch.int64
    assert linear_sum_assignment([[2, 1], [1, 2]])[1].tolist() == [1, 0]


class AskingForIous(nn.Linear):
    """A module of this file, whose ``pairwise_iou`` a dry run replaces."""


@pytest.mark.parametrize("num", [20, 300])  # of 300, the matrix of a chunk is not computed
@pytest.mark.parametrize("is_chunked", [False, True])
def test_labels_without_values_are_those_of_any_anchors(num, is_chunked):
    boxes, anchors = (
        Boxes(torch.as_tensor(boxes_anywhere(n, (200, 300), seed=n)).float()) for n in (num, 5000)
    )
    matcher = Matcher([0.3, 0.7], [0, -1, 1], allow_low_quality_matches=True)
    matches, labels = matcher(pairwise_iou(boxes, anchors))
    model = AskingForIous(2, 2)
    run = DryRun(model)
    with fast_matching(model), run:
        iou = pairwise_iou_in_chunks(4096, pairwise_iou) if is_chunked else pairwise_iou
        ours, our_labels = matcher(iou(boxes, anchors))
    assert (ours.shape, our_labels.dtype) == (matches.shape, labels.dtype)
    if num == 20:  # computed
        assert torch.equal(our_labels, labels)
    else:
        assert our_labels.unique(return_counts=True)[1].tolist() == [5000 - 256, 256]
    assert ours.max() < num
    assert not is_fake((ours, our_labels))
