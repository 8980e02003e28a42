#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Train detectors with light backbones, which MODEL.BACKBONE.NAME selects.

    python projects/SmallerModels/backbones.py --config-file FILE [as for d2-memfit train]

Importing this module registers ``build_NAME_fpn_backbone`` for the MobileNetV3 (Howard et al.,
arXiv:1905.02244) and ShuffleNetV2 (Ma et al., arXiv:1807.11164) of torchvision.
"""

import torch
from detectron2.config import CfgNode
from detectron2.layers import FrozenBatchNorm2d, ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, FPN, Backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from torchvision import models
from torchvision.models.feature_extraction import create_feature_extractor

from d2_memfit.cli.train import Trainer as MemfitTrainer
from d2_memfit.cli.train import run_script
from d2_memfit.common.errors import ConfigError

_MOBILENET = [f"features.{i}" for i in range(16)]
_SHUFFLENET = ["conv1", "maxpool", "stage2", "stage3", "stage4"]
# The layers, and the last ones of "res2" to "res5" with their channels.
_LIGHT = {
    "mobilenet_v3_large": (_MOBILENET, (3, 6, 12, 15), (24, 40, 112, 160)),
    "shufflenet_v2_x1_0": (_SHUFFLENET, (1, 2, 3, 4), (24, 116, 232, 464)),
}


class LightBackbone(Backbone):
    """A classifier of torchvision without its last layers, under torchvision's names.

    Args:
        name: the classifier.
        norm: "BN" or "FrozenBN", as in MODEL.RESNETS.NORM.
        freeze_at: as in MODEL.BACKBONE.FREEZE_AT: 1 is the first layer, 2 to 5 "res2" to "res5".

    Raises:
        ConfigError: there is no such norm.
    """

    def __init__(self, name: str, norm: str, freeze_at: int) -> None:
        super().__init__()
        if norm not in ("BN", "FrozenBN"):
            raise ConfigError(f"MODEL.RESNETS.NORM must be BN or FrozenBN for {name}, got {norm!r}")
        layers, last, channels = _LIGHT[name]
        self._out_features = stages = ["res2", "res3", "res4", "res5"]
        nodes = {layers[i]: stage for i, stage in zip(last, stages)}
        self.body = create_feature_extractor(getattr(models, name)(), nodes)
        self._out_feature_channels = dict(zip(stages, channels))
        self._out_feature_strides = dict(zip(stages, (4, 8, 16, 32)))
        if norm == "FrozenBN":
            FrozenBatchNorm2d.convert_frozen_batchnorm(self.body)
        for layer in layers[: (0, 1, *(i + 1 for i in last))[freeze_at]]:
            FrozenBatchNorm2d.convert_frozen_batchnorm(self.body.get_submodule(layer))
            self.body.get_submodule(layer).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.body(x)


def _register(name: str) -> None:
    def build(cfg: CfgNode, input_shape: ShapeSpec) -> Backbone:
        fpn = cfg.MODEL.FPN
        body = LightBackbone(name, cfg.MODEL.RESNETS.NORM, cfg.MODEL.BACKBONE.FREEZE_AT)
        top = LastLevelMaxPool()
        return FPN(body, fpn.IN_FEATURES, fpn.OUT_CHANNELS, fpn.NORM, top, fpn.FUSE_TYPE)

    build.__name__ = f"build_{name}_fpn_backbone"
    BACKBONE_REGISTRY.register(build)


for _name in _LIGHT:
    _register(_name)


class Trainer(MemfitTrainer):
    """Trains them: ``d2-memfit plan --trainer backbones:Trainer``."""


if __name__ == "__main__":
    run_script(Trainer, (), __doc__)
