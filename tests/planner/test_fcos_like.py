# Copyright (c) the d2_memfit developers.
"""A detector without proposals, whose scores decide how much its evaluation takes."""

import math
from contextlib import nullcontext

import pytest
import torch
from detectron2.structures import Boxes, Instances
from torch import nn

from d2_memfit import Job, estimate_memory, plan_memory
from d2_memfit.memory import TensorMeter
from d2_memfit.planner.dry_run import DryRun
from d2_memfit.planner.text import answer_of_plan, describe_estimate
from d2_memfit.planner.values import WithoutValues
from d2_memfit.planner.worst_outputs import detect_most

MOST = 10  # detections


class MasksOfPoints(nn.Module):
    """FCOS with a mask of each detection, as CondInst makes them.

    It keeps the best as AdelaiDet does: all that are no worse than the worst of those it may keep.
    """

    def __init__(self, prior):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 64, 3, 8, 1), nn.GroupNorm(8, 64), nn.ReLU())
        self.scores, self.boxes = nn.Conv2d(64, 20, 3, 1, 1), nn.Conv2d(64, 4, 3, 1, 1)
        nn.init.constant_(self.scores.bias, -math.log((1 - prior) / prior))

    def forward(self, batch):
        return [{"instances": self.detect(image["image"].float())} for image in batch]

    def detect(self, image):
        features = self.features(image[None] / 255)
        scores = self.scores(features).sigmoid().flatten(2)[0].t()
        sides = self.boxes(features).exp().flatten(2)[0].t()
        points, classes = (scores > 0.05).nonzero().unbind(1)
        best = scores[points, classes]
        if len(best) > MOST:
            worst = best.kthvalue(len(best) - MOST + 1).values
            points, classes = points[best >= worst], classes[best >= worst]
        result = Instances(image.shape[1:])
        result.pred_boxes = Boxes(torch.cat([-sides, sides], dim=1)[points, :4])
        result.scores, result.pred_classes = scores[points, classes], classes
        masks = nn.functional.interpolate(features[:, :1], image.shape[1:])[:, 0]
        result.pred_masks = masks.repeat(len(points), 1, 1) > 0.5
        return result


def evaluate(prior, note=lambda line: None, build=WithoutValues):
    """Peak of an evaluation in bytes, and the numbers of detections of each forward."""
    torch.manual_seed(0)
    image = torch.randint(0, 256, (3, 320, 480), dtype=torch.uint8)
    found = []
    with build():
        model = MasksOfPoints(prior).eval()
    model.register_forward_hook(lambda _, __, output: found.append(len(output[0]["instances"])))
    with DryRun(model) as run, torch.no_grad():
        run.own("inputs", image)
        detect_most(model, [{"image": image}], note)
    return run.peak_bytes, found


@pytest.mark.parametrize(("prior", "detections"), [(0.01, [0]), (0.5, [10])])
def test_an_evaluation_has_the_memory_of_one_that_is_computed(prior, detections, monkeypatch):
    noted = []
    peak, found = evaluate(prior, noted.append)
    assert len(noted) == (detections == [0])
    monkeypatch.setattr(DryRun, "_call", TensorMeter._call)
    expected, computed = evaluate(prior, build=nullcontext)
    assert found == computed == detections
    assert peak == pytest.approx(expected, rel=0.001)


class Trained(MasksOfPoints):
    def __init__(self):
        super().__init__(0.01)

    def forward(self, batch):
        if not self.training:
            return super().forward(batch)
        images = torch.stack([d["image"] for d in batch])
        return {"loss": self.scores(self.features(images / 255)).sum()}


@pytest.fixture
def job():
    image = {"image": torch.zeros(3, 160, 240, dtype=torch.uint8), "height": 160, "width": 240}
    return Job(
        model=Trained,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        test_loader=list,
        images_per_batch=4,
        batch=[image],
        device="cpu",
    )


def test_an_estimate_of_what_is_not_known_is_at_least_with_the_reason(job):
    estimate = estimate_memory(job, device="cpu")
    (reason,) = estimate.at_least
    assert reason.startswith("Trained ")
    assert f"At least: {reason}" in describe_estimate(estimate)
    assert not estimate_memory(job, device="cpu", evaluates=False).at_least


@pytest.mark.parametrize("share", [1.5, 0.2])
def test_a_plan_says_that_it_leaves_no_room_for_what_is_not_known(job, share):
    needed = estimate_memory(job, device="cpu").device_total_gb
    plan = plan_memory(job, budget_gb=share * needed / 0.9, device="cpu")
    first, *lines = answer_of_plan(plan).splitlines()
    assert plan.fits == (share > 1)
    assert " at least " in first
    assert any(line.startswith("At least: Trained ") for line in lines)
