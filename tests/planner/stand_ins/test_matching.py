# Copyright (c) the d2_memfit developers.
"""Matching in a dry run."""

import pytest
import torch
from detectron2.modeling.matcher import Matcher
from detectron2.structures import Boxes, pairwise_iou
from torch import nn

from d2_memfit.job import boxes_anywhere
from d2_memfit.planner.dry_run import DryRun
from d2_memfit.planner.stand_ins import fast_matching
from d2_memfit.planner.stand_ins.matching import _find_labels, _Overlaps

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


@pytest.mark.parametrize(
    "matcher",
    [
        Matcher([0.3, 0.7], [0, -1, 1], allow_low_quality_matches=True),
        Matcher([0.5], [0, 1], allow_low_quality_matches=False),
    ],
)
@pytest.mark.parametrize("has_box_outside", [False, True])
def test_labels_of_anchors_are_those_of_detectron2(matcher, has_box_outside):
    boxes, anchors = (
        torch.as_tensor(boxes_anywhere(num, (200, 300), seed=seed)).float()
        for seed, num in enumerate((20, 5000))
    )
    boxes[3, 2:] = boxes[3, :2]  # an empty box overlaps nothing, like one outside
    if has_box_outside:
        boxes[4] += 1000
    else:
        boxes = boxes[4:]
    matrix = pairwise_iou(Boxes(boxes), Boxes(anchors))
    matches, labels = matcher(matrix)
    ours, our_labels = _find_labels(matcher, boxes.numpy(), _Overlaps(anchors.numpy()))
    assert torch.equal(our_labels, labels)
    is_matched = matrix.max(dim=0).values > 0
    assert torch.equal(ours[is_matched], matches[is_matched])


def test_overlaps_are_kept_for_other_images():
    anchors = boxes_anywhere(5000, (200, 300), seed=1).astype("float32")
    boxes = boxes_anywhere(20, (200, 300)).astype("float32")
    matcher = Matcher([0.3, 0.7], [0, -1, 1], allow_low_quality_matches=True)
    overlaps = _Overlaps(anchors)
    _find_labels(matcher, boxes, overlaps)
    assert overlaps.of(boxes[3])[1] is overlaps.of(boxes[3])[1]
    few = _find_labels(matcher, boxes[3:9], overlaps)
    expected = _find_labels(matcher, boxes[3:9], _Overlaps(anchors))
    assert all(map(torch.equal, few, expected))
