# Copyright (c) the d2_memfit developers.
import pytest
import torch
from detectron2.modeling.roi_heads.mask_head import MaskRCNNConvUpsampleHead, mask_rcnn_loss
from tiny import tiny_cfg, tiny_model

from d2_memfit.common.errors import ConfigError
from d2_memfit.config.settings import check_settings
from d2_memfit.memory import TensorMeter
from d2_memfit.techniques.registry import apply_techniques


def apply(model, chunk_size):
    cfg = tiny_cfg()
    cfg.MEMFIT.HEADS.CHUNK_SIZE = chunk_size
    check_settings(cfg)
    return apply_techniques("model", model, cfg)


@pytest.mark.parametrize("family", ["mask_rcnn", "keypoint_rcnn"])
def test_layers_give_the_same_for_any_number_of_proposals(family):
    cfg = tiny_cfg(family)
    kind = family.split("_")[0] + "_head"
    plain = getattr(tiny_model(cfg).roi_heads, kind)
    changed = getattr(apply(tiny_model(cfg), 3).roi_heads, kind)
    for num in (0, 1, 3, 8):
        x = torch.rand(num, 16, 14, 14)
        torch.testing.assert_close(changed.layers(x), plain.layers(x))


def test_memory_is_that_of_one_chunk():
    cfg = tiny_cfg("mask_rcnn")
    cfg.MODEL.ROI_MASK_HEAD.NUM_CONV = 4
    x, peaks = torch.rand(64, 16, 14, 14), []
    for chunk_size in (None, 4):
        model = tiny_model(cfg)
        head = (apply(model, chunk_size) if chunk_size else model).roi_heads.mask_head
        with TensorMeter() as meter:
            head.layers(x).sum().backward()
        peaks.append(meter.peak_bytes)
    assert peaks[1] < 0.35 * peaks[0]


class OwnHead(MaskRCNNConvUpsampleHead):
    def forward(self, x, instances):
        for layer in self:
            x = layer(x)
        return mask_rcnn_loss(x, instances)


def test_heads_that_cannot_be_cut_are_errors():
    normed, own = tiny_cfg("mask_rcnn"), tiny_model(tiny_cfg("mask_rcnn"))
    normed.MODEL.ROI_MASK_HEAD.NORM = "BN"
    own.roi_heads.mask_head.__class__ = OwnHead
    for model, message in (
        (tiny_model(tiny_cfg("faster_rcnn")), "CHUNK_SIZE: the model has no mask or keypoint"),
        (tiny_model(normed), "MaskRCNNConvUpsampleHead has batch normalisation"),
        (own, "CHUNK_SIZE: the OwnHead has its own forward, without"),
    ):
        with pytest.raises(ConfigError, match=message):
            apply(model, 4)
