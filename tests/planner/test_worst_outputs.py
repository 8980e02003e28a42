# Copyright (c) the d2_memfit developers.
"""Proposals and detections as many as there can be, and those whose number is not known."""

import pytest
import torch
from detectron2.modeling.proposal_generator.rpn import RPN
from detectron2.modeling.roi_heads import StandardROIHeads
from detectron2.structures import Boxes, ImageList, Instances, RotatedBoxes
from detectron2.utils.events import EventStorage
from tiny import images, tiny_cfg, tiny_model
from torch import nn

from d2_memfit.planner.worst_outputs import detect_most, worst_case

pytestmark = pytest.mark.filterwarnings("ignore")


def not_to_be_noted(text):
    raise AssertionError(text)


def seen_by(module):
    """What a module is called with, after other hooks."""
    calls = []
    forward = module.forward

    def noting_forward(*args, **kwargs):
        calls.append(args)
        return forward(*args, **kwargs)

    module.forward = noting_forward
    return calls


def are_objects(proposals, image):
    objects = image["instances"].gt_boxes.tensor
    return (proposals.proposal_boxes.tensor[:, None] == objects).all(dim=2).any(dim=1)


class Wrapped(nn.Module):
    """A model in another, such as a teacher beside its student."""

    def __init__(self, model):
        super().__init__()
        self.inner = nn.ModuleDict({"student": model})

    def forward(self, pair):
        return self.inner["student"](pair[0])


@pytest.mark.parametrize("nested", [False, True])
def test_roi_heads_get_as_many_as_they_may_and_enough_on_objects(nested):
    model = tiny_model(tiny_cfg("mask_rcnn"))
    batch = images(2)
    calls = seen_by(model.roi_heads)
    whole, argument = (Wrapped(model), (batch, [])) if nested else (model, batch)
    with worst_case(whole, not_to_be_noted), EventStorage():
        whole(argument)
    (_, _, proposals, *_), num = calls[0], model.proposal_generator.post_nms_topk[True]
    quota = round(model.roi_heads.batch_size_per_image * model.roi_heads.positive_fraction)
    assert [len(p) for p in proposals] == [num, num]
    assert [are_objects(p, d).sum() for p, d in zip(proposals, batch)] == [quota, quota]
    assert not model.roi_heads._forward_pre_hooks


class BranchedRPN(RPN):
    """Each image once for each of three branches, as in TridentNet."""

    def forward(self, images, features, gt_instances=None):
        images = ImageList(torch.cat([images.tensor] * 3), images.image_sizes * 3)
        features = {name: torch.cat([feature] * 3) for name, feature in features.items()}
        return super().forward(images, features, gt_instances * 3 if gt_instances else None)


class BranchedHeads(StandardROIHeads):
    def forward(self, images, features, proposals, targets=None):
        features = {name: torch.cat([feature] * 3) for name, feature in features.items()}
        return super().forward(images, features, proposals, targets * 3 if targets else None)


def test_all_branches_get_proposals_on_the_objects_of_their_image():
    model = tiny_model(tiny_cfg("mask_rcnn"))
    model.proposal_generator.__class__ = BranchedRPN
    model.roi_heads.__class__ = BranchedHeads
    calls, batch = seen_by(model.roi_heads), images(2)
    with worst_case(model, not_to_be_noted), EventStorage() as storage:
        model(batch)
    proposals, num = calls[0][2], model.proposal_generator.post_nms_topk[True]
    quota = round(model.roi_heads.batch_size_per_image * model.roi_heads.positive_fraction)
    assert [len(p) for p in proposals] == [num] * 6
    assert all(are_objects(p, batch[i % 2]).sum() == quota for i, p in enumerate(proposals))
    assert storage.latest()["roi_head/num_fg_samples"][0] == quota


def test_an_evaluation_has_all_that_may_be_detected():
    cfg = tiny_cfg("mask_rcnn")
    cfg.TEST.DETECTIONS_PER_IMAGE = 7
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.999  # so that without it nothing is detected
    model = tiny_model(cfg).eval()
    found = []
    model.register_forward_hook(lambda _, __, output: found.append(output[0]["instances"]))
    with torch.no_grad(), worst_case(model, not_to_be_noted):
        model(images(1))
        detect_most(model, images(1), not_to_be_noted)
    nothing, most = found
    assert len(nothing) == 0
    assert most.pred_masks.shape == (7, 64, 64)


class OtherGenerator(nn.Module):
    """One that has other fields, and its limits in another object."""

    def __init__(self, limits):
        super().__init__()
        self.outputs = nn.Module()
        vars(self.outputs).update(limits)

    def forward(self, images, features, gt_instances=None):
        found = [Instances(size) for size in images.image_sizes]
        for i, p in enumerate(found):
            p.proposal_boxes = Boxes(torch.tensor([[1.0, 1.0, 9.0, 9.0]] * i).reshape(-1, 4))
            p.objectness_logits = torch.zeros(i)
            p.centers = torch.full((i, 2), 3.0)
        return found, {}


LIMITS = {"post_nms_topk": {True: 70, False: 30}}


@pytest.mark.parametrize("training", [False, True])
def test_proposals_of_other_generators_are_as_many_as_their_limits(training):
    model = tiny_model(tiny_cfg("mask_rcnn")).train(training)
    model.proposal_generator = OtherGenerator(LIMITS)
    model.roi_heads.proposal_append_gt = False  # objects have no centers
    calls = seen_by(model.roi_heads)
    with worst_case(model, not_to_be_noted), EventStorage():
        model(images(2))
    num = 70 if training else 30
    for p, center in zip(calls[0][2], (0, 3)):  # nothing was found in the first image
        assert len(p) == num
        assert set(p.get_fields()) == {"proposal_boxes", "objectness_logits", "centers"}
        assert torch.equal(p.centers, torch.full((num, 2), float(center)))


class Rotated(RPN):
    def forward(self, images, features, gt_instances=None):
        found, losses = super().forward(images, features, gt_instances)
        for p in found:
            p.proposal_boxes = RotatedBoxes(torch.zeros(len(p), 5))
        return found, losses


@pytest.mark.parametrize("case", ["no limit", "other boxes", "no list"])
def test_other_proposals_are_left_alone_and_that_is_said(case):
    model = tiny_model(tiny_cfg("mask_rcnn"))
    batch = images(2)
    noted = []
    if case == "no limit":
        model.eval()
        model.proposal_generator = OtherGenerator({})
    elif case == "other boxes":
        model.proposal_generator.__class__ = Rotated
    calls = []
    model.roi_heads.forward = lambda *args: calls.append(args) or ([], {})
    with worst_case(model, noted.append), EventStorage():
        for _ in range(2):
            if case == "no list":
                model.roi_heads(None, None, {"proposals": []}, None)
            else:
                model(batch)
    name = type(model.proposal_generator).__name__
    assert all(line.startswith(f"The proposals of {name} are those of a dry run") for line in noted)
    assert len(noted) == 2
    if case == "no limit":
        assert [len(p) for p in calls[0][2]] == [0, 1]


def test_another_use_of_fast_rcnn_inference_is_left_alone_and_that_is_said(monkeypatch):
    from detectron2.modeling.roi_heads import fast_rcnn

    model, noted = tiny_model(tiny_cfg("mask_rcnn")), []
    monkeypatch.setattr(fast_rcnn, "fast_rcnn_inference", lambda *args, function=0: args)
    args = [torch.zeros(3, 4)], [torch.zeros(3, 2)], [(20, 30)], 0.05, 0.5, 9
    for of_project in ((*args, "soft"), (*args[:2], [(20, 30)] * 2, *args[3:])):
        model.forward = lambda _, given=of_project: fast_rcnn.fast_rcnn_inference(*given)
        detect_most(model, None, noted.append)
    model.forward = lambda _: fast_rcnn.fast_rcnn_inference(args, function="soft")
    detect_most(model, None, noted.append)
    assert len(noted) == 3
    assert all("detections" in line for line in noted)
