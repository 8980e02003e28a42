# Copyright (c) the d2_memfit developers.
"""Techniques that change what is trained: the keys of Detectron2 that they set, on real models."""

import detectron2.projects.point_rend  # noqa: F401, registers its mask head
import pytest
import torch
from detectron2.modeling import build_model
from detectron2.utils.events import EventStorage
from tiny import images, tiny_cfg

from d2_memfit import Job, get_cfg
from d2_memfit.common.errors import ConfigError
from d2_memfit.techniques.registry import apply_techniques, get_technique


@pytest.mark.parametrize(
    ("name", "opts", "expected"),
    [
        ("SmallerImages", [], {"INPUT.MIN_SIZE_TRAIN": (600,), "INPUT.MAX_SIZE_TRAIN": 999,
                               "INPUT.MIN_SIZE_TEST": 600, "INPUT.MAX_SIZE_TEST": 999}),
        ("SmallerImages", ["INPUT.MIN_SIZE_TRAIN", (320,)], {}),
        ("OneImageSize", ["INPUT.MIN_SIZE_TRAIN", (640, 800)], {"INPUT.MIN_SIZE_TRAIN": (640,)}),
        ("PolygonMasks", ["MODEL.MASK_ON", True, "INPUT.MASK_FORMAT", "bitmask"],
         {"INPUT.MASK_FORMAT": "polygon"}),
        ("PolygonMasks", ["MODEL.MASK_ON", True, "INPUT.MASK_FORMAT", "bitmask",
                          "MODEL.ROI_MASK_HEAD.NAME", "PointRendMaskHead"], {}),
        ("FewerDetections", [], {"TEST.DETECTIONS_PER_IMAGE": 50}),
        ("FewerDetections", ["TEST.DETECTIONS_PER_IMAGE", 30], {}),
        ("MoreFrozenStages", ["MODEL.WEIGHTS", ""], {}),
        ("MixedPrecision", ["MODEL.DEVICE", "cpu"],
         {"SOLVER.AMP.ENABLED": True, "MEMFIT.AMP_DTYPE": "bfloat16"}),
        ("MixedPrecision", [], {"SOLVER.AMP.ENABLED": True, "MEMFIT.AMP_DTYPE": "float16"}),
    ],
)  # fmt: skip
def test_settings_follow_the_config(name, opts, expected):
    cfg = get_cfg()
    cfg.merge_from_list(opts)
    assert get_technique(name).settings(Job.from_cfg(cfg, 1), None) == expected


def frozen(family, *patterns):
    cfg = tiny_cfg(family)
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MEMFIT.FINE_TUNE.FROZEN = list(patterns)
    return apply_techniques("model", build_model(cfg), cfg).train()


def test_the_pretrained_part_is_frozen_and_the_pyramid_learns():
    model = frozen("mask_rcnn", "backbone")
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert not any(name.startswith("backbone.bottom_up.") for name in names)
    assert "backbone.fpn_lateral2.weight" in names
    before = {k: v.clone() for k, v in model.backbone.bottom_up.state_dict().items()}
    with EventStorage():
        sum(model(images(2)).values()).backward()
    after = model.backbone.bottom_up.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)  # statistics of batch norms, too


def test_other_modules_are_frozen_by_their_names():
    model = frozen("mask_rcnn", "backbone.bottom_up.res*", "roi_heads.mask_head")
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    assert any(name.startswith("backbone.bottom_up.stem") for name in names)
    assert not any(".res4." in name or "mask_head" in name for name in names)
    with pytest.raises(ConfigError, match="no module of the model matches 'backbones'"):
        frozen("mask_rcnn", "backbones")
