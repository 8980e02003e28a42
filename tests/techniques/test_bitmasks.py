# Copyright (c) the d2_memfit developers.
import pytest
import torch
from detectron2.projects.point_rend import add_pointrend_config
from detectron2.utils.events import EventStorage
from tiny import images, tiny_cfg, tiny_model

from d2_memfit.memory import TensorMeter
from d2_memfit.techniques import get_technique


@pytest.mark.parametrize("is_point_rend", [False, True])
def test_losses_and_gradients_are_equal_to_the_last_bit(is_point_rend):
    cfg = tiny_cfg("mask_rcnn")
    if is_point_rend:
        add_pointrend_config(cfg)
        cfg.MODEL.ROI_MASK_HEAD.NAME = "PointRendMaskHead"
        cfg.MODEL.ROI_MASK_HEAD.POOLER_TYPE = ""
        cfg.MODEL.ROI_MASK_HEAD.FC_DIM = cfg.MODEL.ROI_MASK_HEAD.CONV_DIM
        cfg.MODEL.ROI_MASK_HEAD.OUTPUT_SIDE_RESOLUTION = 7
        cfg.MODEL.ROI_MASK_HEAD.IN_FEATURES = ["p2"]
        cfg.MODEL.ROI_MASK_HEAD.POINT_HEAD_ON = True
        cfg.MODEL.POINT_HEAD.IN_FEATURES = ["p2"]
        cfg.MODEL.POINT_HEAD.NUM_CLASSES = cfg.MODEL.ROI_HEADS.NUM_CLASSES
    found = []
    for is_on in (False, True):
        model = tiny_model(cfg)
        if is_on:
            get_technique("PackedMasks").apply(model, cfg)
        torch.manual_seed(0)
        with EventStorage():
            losses = model(images(2, num_instances=5))
        sum(losses.values()).backward()
        found.append((losses, [p.grad for p in model.parameters() if p.grad is not None]))
    assert ("loss_mask_point" in found[0][0]) == is_point_rend
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1]))


def test_proposals_make_no_copies():
    cfg = tiny_cfg("mask_rcnn")
    cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 200
    batch, peaks, losses = images(1, size=256), [], []
    for is_on in (False, True):
        model = tiny_model(cfg)
        if is_on:
            get_technique("PackedMasks").apply(model, cfg)
        torch.manual_seed(0)
        with TensorMeter() as meter, EventStorage():
            losses.append(model(batch))
        peaks.append(meter.peak_bytes)
    proposals = cfg.MODEL.RPN.POST_NMS_TOPK_TRAIN
    assert peaks[1] < peaks[0] - 0.5 * proposals * 256 * 256
    assert losses[0] == losses[1]
