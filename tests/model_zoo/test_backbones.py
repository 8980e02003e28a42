# Copyright (c) the d2_memfit developers.
import json
import pickle

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.layers import FrozenBatchNorm2d
from detectron2.modeling import build_backbone, build_model
from torch import nn
from torchvision import models

from d2_memfit import MemfitTrainer
from d2_memfit.config import load_cfg
from d2_memfit.errors import ConfigError
from d2_memfit.model_zoo.backbones import LIGHT_BACKBONES

pytestmark = pytest.mark.slow

CHANNELS = {  # of res2 to res5
    "build_mobilenet_v3_large_fpn_backbone": [24, 40, 112, 160],
    "build_mobilenet_v3_small_fpn_backbone": [16, 24, 48, 96],
    "build_shufflenet_v2_x1_0_fpn_backbone": [24, 116, 232, 464],
    "build_shufflenet_v2_x0_5_fpn_backbone": [24, 48, 96, 192],
    "build_regnetx_400mf_fpn_backbone": [32, 64, 160, 384],
    "build_regnetx_800mf_fpn_backbone": [64, 128, 288, 672],
    "build_regnety_400mf_fpn_backbone": [48, 104, 208, 440],
}


def config(name, *opts):
    cfg = load_cfg(
        "COCO-Detection/faster_rcnn_R_50_FPN_3x.yaml",
        ["MODEL.BACKBONE.NAME", name, "MODEL.DEVICE", "cpu", *opts],
    )
    return cfg


def test_all_are_known():
    assert sorted(CHANNELS) == sorted(LIGHT_BACKBONES)


@pytest.mark.parametrize("name", LIGHT_BACKBONES)
def test_stages_have_the_strides_that_fpn_needs(name):
    backbone = build_backbone(config(name, "MODEL.FPN.OUT_CHANNELS", 16))
    bottom_up = backbone.bottom_up
    with torch.no_grad():
        features = bottom_up(torch.zeros(1, 3, 96, 128))
        pyramid = backbone(torch.zeros(1, 3, 96, 128))
    for i, (stage, shape) in enumerate(bottom_up.output_shape().items()):
        assert stage == f"res{i + 2}"
        assert (shape.stride, shape.channels) == (2 ** (i + 2), CHANNELS[name][i])
        size = (96 // shape.stride, 128 // shape.stride)
        assert features[stage].shape == (1, shape.channels, *size)
    heights = {k: (v.shape[1], v.shape[2]) for k, v in pyramid.items()}
    assert heights == {f"p{i}": (16, -(-96 // 2**i)) for i in range(2, 7)}


@pytest.mark.parametrize("name", LIGHT_BACKBONES)
def test_what_is_frozen_is_a_stage(name):
    def gradients(freeze_at):
        bottom_up = build_backbone(
            config(name, "MODEL.BACKBONE.FREEZE_AT", freeze_at, "MODEL.RESNETS.NORM", "BN")
        ).bottom_up
        features = bottom_up(torch.rand(2, 3, 64, 64))
        norms = [m for m in bottom_up.modules() if isinstance(m, FrozenBatchNorm2d)]
        return [f.requires_grad for f in features.values()], bool(norms)

    assert gradients(0) == ([True] * 4, False)
    is_pooled = "shufflenet" in name  # its res2 is a pooling of the stem
    assert gradients(1) == ([not is_pooled, True, True, True], True)
    assert gradients(3) == ([False, False, True, True], True)
    assert gradients(5) == ([False] * 4, True)


@pytest.mark.parametrize("name", ["mobilenet_v3_small", "shufflenet_v2_x0_5"])
def test_weights_of_torchvision_are_taken(name, tmp_path):
    weights = getattr(models, name)().state_dict()
    file = tmp_path / "weights.pkl"
    arrays = {k: v.numpy() for k, v in weights.items()}
    data = {"model": arrays, "__author__": "torchvision", "matching_heuristics": True}
    file.write_bytes(pickle.dumps(data))
    model = build_model(config(f"build_{name}_fpn_backbone"))
    DetectionCheckpointer(model).load(str(file))
    state = model.backbone.bottom_up.body.state_dict()
    for key, value in state.items():
        assert torch.equal(value, weights[key]), key
    assert any(isinstance(m, nn.Conv2d) for m in model.backbone.bottom_up.body.modules())
    with torch.no_grad():  # the same features as torchvision's own layers
        reference = getattr(models, name)()
        reference.load_state_dict(weights)
        reference.eval()
        layers = (
            reference.features[:-1]
            if name.startswith("mobile")
            else nn.Sequential(*[getattr(reference, n) for n in ("conv1", "maxpool", "stage2",
                                                                 "stage3", "stage4")])
        )  # fmt: skip
        x = torch.rand(1, 3, 64, 96)
        result = model.backbone.bottom_up(x)["res5"]
        assert (result - layers(x)).abs().max() <= 1e-4 * result.abs().max()


def test_a_norm_with_other_parameters_is_an_error():
    with pytest.raises(ConfigError, match=r"MODEL.RESNETS.NORM must be one of BN, .* got 'GN'"):
        build_backbone(config(LIGHT_BACKBONES[0], "MODEL.RESNETS.NORM", "GN"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [LIGHT_BACKBONES[0], LIGHT_BACKBONES[2], LIGHT_BACKBONES[4]])
def test_it_learns_coins_from_random_weights(name, coins, tmp_path):
    opts = {
        "MODEL.BACKBONE.NAME": name,
        "MODEL.WEIGHTS": "",
        "MODEL.DEVICE": "cpu",
        "MODEL.BACKBONE.FREEZE_AT": 0,
        "MODEL.RESNETS.NORM": "BN",
        "MODEL.FPN.OUT_CHANNELS": 64,
        "MODEL.ROI_BOX_HEAD.FC_DIM": 256,
        "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 128,
        "MODEL.RPN.POST_NMS_TOPK_TRAIN": 200,
        "MODEL.PIXEL_STD": [58.0, 58.0, 58.0],
        "INPUT.MIN_SIZE_TRAIN": (160,),
        "SOLVER.IMS_PER_BATCH": 4,
        "SOLVER.BASE_LR": 0.01,
        "SOLVER.MAX_ITER": 120,
        "SOLVER.STEPS": (100,),
        "SOLVER.WARMUP_ITERS": 20,
        "DATALOADER.NUM_WORKERS": 0,
        "DATASETS.TRAIN": ("coins_train",),
        "DATASETS.TEST": (),
        "MODEL.ROI_HEADS.NUM_CLASSES": 1,
        "OUTPUT_DIR": str(tmp_path),
    }
    pairs = [value for pair in opts.items() for value in pair]
    trainer = MemfitTrainer(load_cfg("COCO-Detection/faster_rcnn_R_50_FPN_3x.yaml", pairs))
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    losses = [line["total_loss"] for line in lines if "total_loss" in line]
    found = [line.get("fast_rcnn/fg_cls_accuracy", 0) for line in lines][-1]
    print(f"{name}: loss {losses[0]:.2f} to {losses[-1]:.2f}, coins told {found:.0%}")
    assert losses[-1] < 0.7 * losses[0]
    assert found > 0.4
