# Copyright (c) the d2_memfit developers.
import torch
from detectron2.structures import BitMasks
from detectron2.utils.events import EventStorage
from tiny import images, tiny_cfg, tiny_model

from d2_memfit.memory import TensorMeter
from d2_memfit.techniques import get_technique
from d2_memfit.techniques.bitmasks import SharedBitMasks


def masks_and_boxes(num_masks=20, num_boxes=50):
    torch.manual_seed(0)
    masks = torch.rand(num_masks, 40, 60) > 0.5
    corner = torch.rand(num_boxes, 2) * 20
    return masks, torch.cat([corner, corner + 1 + torch.rand(num_boxes, 2) * 20], dim=1)


def test_they_are_the_copies_that_they_stand_for():
    masks, boxes = masks_and_boxes()
    index = torch.randint(0, len(masks), (50,))
    plain, shared = BitMasks(masks)[index], SharedBitMasks(masks)[index]
    for item in (slice(None), slice(3, 9), torch.rand(50) > 0.5, torch.tensor([4, 4, 1]), 7):
        p, s = plain[item], shared[item]
        assert len(s) == len(p)
        assert torch.equal(s.tensor, p.tensor)
        assert torch.equal(
            s.crop_and_resize(boxes[: len(p)], 14), p.crop_and_resize(boxes[: len(p)], 14)
        )
    assert torch.equal(shared.nonempty(), plain.nonempty())
    assert torch.equal(BitMasks.cat([shared, shared]).tensor, BitMasks.cat([plain, plain]).tensor)
    assert len(shared.to("cpu")) == 50
    assert torch.equal(torch.stack(list(shared)), plain.tensor)


def test_proposals_make_no_copies():
    cfg = tiny_cfg("mask_rcnn")
    cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 200
    batch, peaks = images(1, size=256), []
    for is_on in (False, True):
        model = tiny_model(cfg)
        if is_on:
            get_technique("SharedBitMaskTargets").apply(model, cfg)
        with TensorMeter() as meter, EventStorage():
            model(batch)
        peaks.append(meter.peak_bytes)
    proposals = cfg.MODEL.RPN.POST_NMS_TOPK_TRAIN
    assert peaks[1] < peaks[0] - 0.5 * proposals * 256 * 256
