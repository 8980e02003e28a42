# Copyright (c) the d2_memfit developers.
"""A detector without proposals, whose scores decide how much its evaluation takes."""

import math
from contextlib import nullcontext

import pytest
import torch
from detectron2.structures import Boxes, Instances
from torch import nn

from d2_memfit.memory import TensorMeter
from d2_memfit.planner.dry_run import DryRun, WithoutValues
from d2_memfit.planner.worst_outputs import worst_detections


class MasksOfPoints(nn.Module):
    """FCOS with a mask of each detection, as CondInst makes them.

    It keeps the best as AdelaiDet does: all that are no worse than the worst of those it may keep.
    """

    def __init__(self, prior, max_detections=10):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 64, 3, 8, 1), nn.GroupNorm(8, 64), nn.ReLU())
        self.scores, self.boxes = nn.Conv2d(64, 20, 3, 1, 1), nn.Conv2d(64, 4, 3, 1, 1)
        nn.init.constant_(self.scores.bias, -math.log((1 - prior) / prior))
        self.max_detections = max_detections

    def forward(self, batch):
        return [{"instances": self.detect(image["image"].float())} for image in batch]

    def detect(self, image):
        features = self.features(image[None] / 255)
        scores = self.scores(features).sigmoid().flatten(2)[0].t()
        sides = self.boxes(features).exp().flatten(2)[0].t()
        points, classes = (scores > 0.05).nonzero().unbind(1)
        best = scores[points, classes]
        if len(best) > self.max_detections:
            worst = best.kthvalue(len(best) - self.max_detections + 1).values
            points, classes = points[best >= worst], classes[best >= worst]
        result = Instances(image.shape[1:])
        result.pred_boxes = Boxes(torch.cat([-sides, sides], dim=1)[points, :4])
        result.scores, result.pred_classes = scores[points, classes], classes
        masks = nn.functional.interpolate(features[:, :1], image.shape[1:])[:, 0]
        result.pred_masks = masks.repeat(len(points), 1, 1) > 0.5
        return result


def evaluate(prior, note=lambda line: None, build=WithoutValues):
    """Peak of an evaluation in bytes, and the number of detections."""
    torch.manual_seed(0)
    image = torch.randint(0, 256, (3, 320, 480), dtype=torch.uint8)
    with build():
        model = MasksOfPoints(prior).eval()
    with DryRun(model, inputs=[image]) as run, torch.no_grad(), worst_detections(model, note):
        (result,) = model([{"image": image}])
    return run.peak_bytes, len(result["instances"])


@pytest.mark.parametrize(("prior", "detections"), [(0.01, 0), (0.5, 10)])
def test_an_evaluation_has_the_memory_of_one_that_is_computed(prior, detections, monkeypatch):
    peak, num = evaluate(prior)
    monkeypatch.setattr(DryRun, "_call", TensorMeter._call)
    expected, num_computed = evaluate(prior, build=nullcontext)
    assert num == num_computed == detections
    assert peak == pytest.approx(expected, rel=0.001)


def test_that_nothing_is_detected_is_said():
    noted = []
    evaluate(0.01, noted.append)
    assert noted == [
        "MasksOfPoints detects nothing in a dry run; an image with many objects needs more"
    ]
    evaluate(0.5, noted.append)
    assert len(noted) == 1
