# Copyright (c) the d2_memfit developers.
"""Matching in a dry run."""

import weakref

import pytest
import torch
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher
from detectron2.structures import Boxes, PolygonMasks, masks, pairwise_iou
from torch import nn

from d2_memfit.job import boxes_anywhere
from d2_memfit.planner.dry_run import DryRun, is_fake
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


@pytest.mark.parametrize("num", [20, 300])  # of 300, the matrix of a chunk is not computed
@pytest.mark.parametrize("is_chunked", [False, True])
def test_labels_in_a_dry_run_are_those_of_detectron2(num, is_chunked):
    boxes, anchors = (
        Boxes(torch.as_tensor(boxes_anywhere(n, (200, 300), seed=n)).float()) for n in (num, 5000)
    )
    matcher = Matcher([0.3, 0.7], [0, -1, 1], allow_low_quality_matches=True)
    matrix = pairwise_iou(boxes, anchors)
    matches, labels = matcher(matrix)
    model = AskingForIous()
    run = DryRun(model)
    with fast_matching(model, run), run:
        if is_chunked:
            quality = PairwiseQuality(
                lambda rows, columns: pairwise_iou(boxes[rows], anchors[columns]), (num, 5000), 4096
            )
            ours, our_labels = ChunkedMatcher(matcher)(quality)
        else:
            ours, our_labels = matcher(pairwise_iou(boxes, anchors))
    assert torch.equal(our_labels, labels)
    is_matched = matrix.max(dim=0).values > 0
    assert torch.equal(ours[is_matched], matches[is_matched])


@pytest.mark.parametrize("is_chunked", [False, True])
def test_boxes_do_not_live_longer_in_a_dry_run(is_chunked):
    boxes, anchors = (Boxes(torch.rand(num, 4).sort().values) for num in (300, 5000))
    storage = weakref.ref(anchors.tensor)
    model = AskingForIous()
    run = DryRun(model)
    with fast_matching(model, run), run:
        matrix = pairwise_iou(boxes, anchors)
        if is_chunked:
            held = anchors
            quality = PairwiseQuality(
                lambda rows, columns: pairwise_iou(boxes[rows], held[columns]), (300, 5000), 4096
            )
            ChunkedMatcher(Matcher([0.5], [0, 1]))(quality)
            del quality, held
            matrix = None
        else:
            Matcher([0.5], [0, 1])(matrix)
        del anchors
        assert storage() is None


class AskingForIous(nn.Linear):
    """A module of this file, whose ``pairwise_iou`` a dry run replaces."""

    def __init__(self):
        super().__init__(2, 2)


def test_an_iou_is_computed_once_for_each_box(monkeypatch):
    anchors = boxes_anywhere(5000, (200, 300), seed=1).astype("float32")
    boxes = boxes_anywhere(20, (200, 300)).astype("float32")
    matcher = Matcher([0.3, 0.7], [0, -1, 1], allow_low_quality_matches=True)
    overlaps = _Overlaps(anchors)
    _find_labels(matcher, boxes, overlaps)
    monkeypatch.setattr(overlaps, "_iou", None)
    few = _find_labels(matcher, boxes[3:9], overlaps)
    expected = _find_labels(matcher, boxes[3:9], _Overlaps(anchors))
    assert all(map(torch.equal, few, expected))


def test_masks_are_rasterized_once_for_each_box(monkeypatch):
    calls = []
    rasterize = masks.rasterize_polygons_within_box

    def counted(*args):
        calls.append(args)
        return rasterize(*args)

    monkeypatch.setattr(masks, "rasterize_polygons_within_box", counted)
    polygons = PolygonMasks([[[0.0, 0, 8, 0, 8, 8]], [[0.0, 0, 8, 0, 0, 8]]])[[0, 1, 0, 0]]
    boxes = torch.tensor([[0.0, 0, 8, 8], [0, 0, 8, 8], [0, 0, 8, 8], [0, 0, 4, 8]])
    expected = polygons.crop_and_resize(boxes, 14)
    assert len(calls) == 4
    model = nn.Linear(2, 2)
    with fast_matching(model, DryRun(model)):
        assert torch.equal(polygons.crop_and_resize(boxes, 14), expected)
    assert len(calls) == 7


def test_targets_of_the_boxes_of_anchors_are_not_computed():
    model = nn.Linear(2, 2)
    transform = Box2BoxTransform((1.0, 1.0, 1.0, 1.0))
    for num, is_large in ((2**10, False), (2**18, True)):
        anchors = torch.tensor([[0.0, 0, 2, 2]]).repeat(num, 1)
        boxes = anchors + 1
        run = DryRun(model)
        with fast_matching(model, run), run:
            deltas = transform.get_deltas(anchors, boxes)
        assert deltas.shape == (num, 4)
        assert is_fake(deltas) == is_large
        assert not is_fake((anchors, boxes))
