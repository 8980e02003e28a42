# Copyright (c) the d2_memfit developers.
"""Light backbones with FPN for small cards, chosen by name in MODEL.BACKBONE.NAME.

Keys of Detectron2's ResNets also apply to them: MODEL.FPN, MODEL.RESNETS.NORM, and
MODEL.BACKBONE.FREEZE_AT, where 1 is the stem and 2 to 5 are "res2" to "res5".
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec, get_norm
from detectron2.modeling import BACKBONE_REGISTRY, FPN, Backbone
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from detectron2.modeling.backbone.regnet import RegNet, ResBottleneckBlock, SimpleStem
from torch import nn

from ..errors import ConfigError

__all__ = ["LIGHT_BACKBONES", "LayeredBackbone"]

_NORMS = ("BN", "FrozenBN", "SyncBN", "naiveSyncBN", "nnSyncBN")
_STRIDES = {"res2": 4, "res3": 8, "res4": 16, "res5": 32}
_PROBE = 64  # side, in pixels, of the image that finds strides

# Radosavovic et al., "Designing Network Design Spaces", arXiv:2003.13678; the numbers are those of
# torchvision/models/regnet.py.
_REGNETS: dict[str, dict[str, Any]] = {
    "regnetx_400mf": {"depth": 22, "w_0": 24, "w_a": 24.48, "w_m": 2.54, "group_width": 16},
    "regnetx_800mf": {"depth": 16, "w_0": 56, "w_a": 35.73, "w_m": 2.28, "group_width": 16},
    "regnety_400mf": {
        **{"depth": 16, "w_0": 48, "w_a": 27.89, "w_m": 2.09, "group_width": 8},
        "se_ratio": 0.25,
    },
}
_MOBILENETS = ("mobilenet_v3_large", "mobilenet_v3_small")  # Howard et al., arXiv:1905.02244
_SHUFFLENETS = ("shufflenet_v2_x1_0", "shufflenet_v2_x0_5")  # Ma et al., arXiv:1807.11164


class LayeredBackbone(Backbone):
    """Layers of a classifier in sequence; layers of the same stride form a stage.

    Args:
        body: the classifier without its last layers, so that its weights can be loaded.
        layers: the names of its layers.
        norm: as in MODEL.RESNETS.NORM; its parameters must be those of BatchNorm.
        freeze_at: as in MODEL.BACKBONE.FREEZE_AT.

    Raises:
        ConfigError: there is no such norm.
    """

    def __init__(
        self, body: nn.Module, layers: Sequence[str], norm: str = "BN", freeze_at: int = 0
    ) -> None:
        super().__init__()
        self.body = body
        self._layers = list(layers)
        self._out_feature_strides: dict[str, int] = {}
        self._out_feature_channels: dict[str, int] = {}
        stages = {stride: stage for stage, stride in _STRIDES.items()}
        last_layers: dict[str, str] = {}  # by stage
        x = torch.zeros(1, 3, _PROBE, _PROBE)
        for name in layers:
            layer = body.get_submodule(name)
            with torch.no_grad():
                x = layer.eval()(x)
            layer.train()
            stride = _PROBE // x.shape[-1]
            if stride in stages:
                last_layers[stages[stride]] = name
                self._out_feature_strides[stages[stride]] = stride
                self._out_feature_channels[stages[stride]] = x.shape[1]
            # FREEZE_AT counts the stem, of stride 2, and then the stages.
            if freeze_at >= stride.bit_length() - 1:
                _freeze(layer)
        self._out_features = list(last_layers)
        self._stages = {layer: stage for stage, layer in last_layers.items()}
        _replace_norms(self, norm)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        features = {}
        for name in self._layers:
            x = self.body.get_submodule(name)(x)
            if name in self._stages:
                features[self._stages[name]] = x
        return features


def _freeze(layer: nn.Module) -> None:
    for p in layer.parameters():
        p.requires_grad = False
    _replace_norms(layer, "FrozenBN")


def _replace_norms(module: nn.Module, norm: str) -> None:
    if norm not in _NORMS:
        raise ConfigError(
            f"MODEL.RESNETS.NORM must be one of {', '.join(_NORMS)} for a light backbone, whose "
            f"numbers of channels are not those that others need, got {norm!r}"
        )
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            new = get_norm(norm, child.num_features)
            new.eps = child.eps
            module.add_module(name, new)
        else:
            _replace_norms(child, norm)


def _of_torchvision(name: str, cfg: CfgNode) -> Backbone:
    from torchvision import models

    body = getattr(models, name)()
    if name in _MOBILENETS:
        body.features = body.features[:-1]  # the last layer is only for classification
        layers = [f"features.{i}" for i in range(len(body.features))]
        del body.avgpool, body.classifier
    else:
        layers = ["conv1", "maxpool", "stage2", "stage3", "stage4"]
        del body.conv5, body.fc
    return LayeredBackbone(body, layers, cfg.MODEL.RESNETS.NORM, cfg.MODEL.BACKBONE.FREEZE_AT)


def _regnet(name: str, cfg: CfgNode) -> Backbone:
    """Detectron2's RegNet, with stages named "res2" to "res5" for FPN's configs."""
    regnet: Any = RegNet(
        stem_class=SimpleStem,
        stem_width=32,
        block_class=ResBottleneckBlock,
        norm=cfg.MODEL.RESNETS.NORM,
        freeze_at=cfg.MODEL.BACKBONE.FREEZE_AT,
        out_features=["s1", "s2", "s3", "s4"],
        **_REGNETS[name],
    )
    names = {f"s{i}": stage for i, stage in enumerate(_STRIDES, 1)}
    regnet.stages_and_names = [(stage, names[old]) for stage, old in regnet.stages_and_names]
    channels = regnet._out_feature_channels
    regnet._out_feature_channels = {names[old]: channels[old] for old in names}
    regnet._out_feature_strides = dict(_STRIDES)
    regnet._out_features = list(_STRIDES)
    return regnet


def _register(name: str, build_bottom_up: Callable[[str, CfgNode], Backbone]) -> str:
    def build(cfg: CfgNode, input_shape: ShapeSpec) -> Backbone:
        return FPN(
            bottom_up=build_bottom_up(name, cfg),
            in_features=cfg.MODEL.FPN.IN_FEATURES,
            out_channels=cfg.MODEL.FPN.OUT_CHANNELS,
            norm=cfg.MODEL.FPN.NORM,
            top_block=LastLevelMaxPool(),
            fuse_type=cfg.MODEL.FPN.FUSE_TYPE,
        )

    build.__name__ = f"build_{name}_fpn_backbone"
    BACKBONE_REGISTRY.register(build)
    return build.__name__


LIGHT_BACKBONES = [
    *(_register(name, _of_torchvision) for name in (*_MOBILENETS, *_SHUFFLENETS)),
    *(_register(name, _regnet) for name in _REGNETS),
]
