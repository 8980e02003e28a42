# Copyright (c) the d2_memfit developers.
"""Proposals and detections as many as there can be, and models that are left alone."""

import pytest
import torch
from detectron2.modeling.proposal_generator.rpn import RPN
from detectron2.structures import Boxes, ImageList, Instances, RotatedBoxes
from detectron2.utils.events import EventStorage
from tiny import images, tiny_cfg, tiny_model
from torch import nn

from d2_memfit.planner.worst_outputs import worst_detections, worst_proposals

pytestmark = pytest.mark.filterwarnings("ignore")


def lines():
    noted = []
    return noted, noted.append


def not_to_be_noted(text):
    raise AssertionError(text)


def seen_by(module):
    """What a module is called with."""
    calls = []
    module.register_forward_pre_hook(lambda _, args: calls.append(args))
    return calls


class Wrapped(nn.Module):
    """A model in another, such as a teacher beside its student."""

    def __init__(self, model):
        super().__init__()
        self.inner = nn.ModuleDict({"student": model})

    def forward(self, pair):
        return self.inner["student"](pair[0])


@pytest.mark.parametrize("nested", [False, True])
def test_an_rpn_finds_as_many_as_it_may_and_half_of_them_on_objects(nested):
    model = tiny_model(tiny_cfg("mask_rcnn"))
    batch = images(2)
    calls = seen_by(model.roi_heads)
    whole, argument = (Wrapped(model), (batch, [])) if nested else (model, batch)
    with worst_proposals(whole, not_to_be_noted), EventStorage():
        whole(argument)
    (_, _, proposals, *_), num = calls[0], model.proposal_generator.post_nms_topk[True]
    assert [len(p) for p in proposals] == [num, num]
    for p, image in zip(proposals, batch):
        objects = image["instances"].gt_boxes.tensor
        is_object = (p.proposal_boxes.tensor[:, None] == objects).all(dim=2).any(dim=1)
        assert is_object.sum() == num // 2
    assert not model.proposal_generator._forward_hooks


def test_more_objects_than_proposals_fill_the_quota_too():
    model = tiny_model(tiny_cfg("mask_rcnn"))
    model.proposal_generator.post_nms_topk[True] = 4
    batch = images(1)
    instances = batch[0]["instances"]
    batch[0]["instances"] = Instances.cat([instances] * 9)
    calls = seen_by(model.roi_heads)
    with worst_proposals(model, not_to_be_noted), EventStorage():
        model(batch)
    found = calls[0][2][0].proposal_boxes.tensor
    assert len(found) == 4
    assert (found[:2, None] == instances.gt_boxes.tensor).all(dim=2).any(dim=1).all()


def test_an_evaluation_has_all_that_may_be_detected():
    cfg = tiny_cfg("mask_rcnn")
    cfg.TEST.DETECTIONS_PER_IMAGE = 7
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.999  # so that without it nothing is detected
    model = tiny_model(cfg).eval()
    with torch.no_grad(), worst_proposals(model, not_to_be_noted):
        nothing = model(images(1))
        with worst_detections(model, not_to_be_noted):
            (found,) = model(images(1))
    assert len(nothing[0]["instances"]) == 0
    assert found["instances"].pred_masks.shape == (7, 64, 64)


class OtherGenerator(nn.Module):
    """As CenterNet2's, which has fields of its own."""

    def forward(self, images, features, gt_instances=None):
        found = [Instances(size) for size in images.image_sizes]
        for p in found:
            p.proposal_boxes = Boxes(torch.tensor([[1.0, 1.0, 9.0, 9.0]]))
            p.objectness_logits = torch.zeros(1)
            p.scores = torch.zeros(1)
        return found, {}


class ThreeBranches(RPN):
    """As TridentNet's."""

    def forward(self, images, features, gt_instances=None):
        found, losses = super().forward(images, features, gt_instances)
        return found * 3, losses


class Rotated(RPN):
    def forward(self, images, features, gt_instances=None):
        found, losses = super().forward(images, features, gt_instances)
        for p in found:
            p.proposal_boxes = RotatedBoxes(torch.zeros(len(p), 5))
        return found, losses


class WithScores(RPN):
    def forward(self, *args):
        return OtherGenerator()(*args)


@pytest.mark.parametrize("cls", [OtherGenerator, ThreeBranches, Rotated, WithScores])
def test_other_proposals_are_left_alone_and_that_is_said_once(cls):
    model = tiny_model(tiny_cfg("mask_rcnn"))
    if cls is OtherGenerator:
        model.proposal_generator = cls()
    else:
        model.proposal_generator.__class__ = cls
    noted, note = lines()
    batch = images(2)
    pixels = ImageList.from_tensors([image["image"].float() for image in batch])
    args = pixels, model.backbone(pixels.tensor), [image["instances"] for image in batch]
    outputs = []
    model.proposal_generator.eval()
    with worst_proposals(model, note):
        outputs = [model.proposal_generator(*args)[0] for _ in range(2)]
    expected = model.proposal_generator(*args)[0]
    for output in outputs:
        assert list(map(len, output)) == list(map(len, expected))
    assert noted == [
        f"The proposals of {cls.__name__} are as the model makes them in a dry run; an image may "
        "have more, and need more"
    ]


def test_a_model_without_roi_heads_is_left_alone():
    model = tiny_model(tiny_cfg("proposal_network"))
    with worst_proposals(model, not_to_be_noted), worst_detections(model, not_to_be_noted):
        assert not model.proposal_generator._forward_hooks


@pytest.mark.parametrize("kind", ["an argument more", "other lists"])
def test_another_use_of_fast_rcnn_inference_is_left_alone_and_that_is_said(kind, monkeypatch):
    from detectron2.modeling.roi_heads import fast_rcnn

    model = tiny_model(tiny_cfg("mask_rcnn"))
    monkeypatch.setattr(fast_rcnn, "fast_rcnn_inference", lambda *args: args)
    sizes = [(20, 30)] * (2 if kind == "other lists" else 1)
    args = [torch.zeros(3, 4)], [torch.zeros(3, 2)], sizes, 0.05, 0.5, 9
    args = (*args, "soft") if kind == "an argument more" else args
    noted, note = lines()
    with worst_detections(model, note):
        assert fast_rcnn.fast_rcnn_inference(*args) is not None
        assert len(fast_rcnn.fast_rcnn_inference(*args)) == len(args)
    assert len(noted) == 1
    assert "detections" in noted[0]
