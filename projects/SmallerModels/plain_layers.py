# Copyright (c) the d2_memfit developers.
"""Detectron2's convolutions as plain PyTorch layers, which other libraries know."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from detectron2.layers import Conv2d
from torch import nn

__all__ = ["norm_and_activation", "plain_convolution", "replace"]


def plain_convolution(layer: nn.Conv2d) -> nn.Conv2d:
    """A ``torch.nn.Conv2d`` with the parameters of a convolution, without norm and activation."""
    plain = nn.Conv2d(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,  # type: ignore[arg-type]
        layer.stride,  # type: ignore[arg-type]
        layer.padding,  # type: ignore[arg-type]
        layer.dilation,  # type: ignore[arg-type]
        layer.groups,
        layer.bias is not None,
        device="meta",
    )
    plain.weight = layer.weight
    plain.bias = layer.bias
    return plain


def norm_and_activation(layer: nn.Module) -> list[nn.Module]:
    """The norm and the activation that one of Detectron2's convolutions has in itself."""
    if not isinstance(layer, Conv2d):
        return []
    norm = layer.norm
    activation = layer.activation
    layers = [] if norm is None else [norm]
    if activation is not None:
        layers.append(nn.ReLU() if activation in (F.relu, F.relu_) else activation)
    return layers


def replace(model: nn.Module, replacements: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules within a model, and in lists such as those of Detectron2's FPN."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in replacements:
                setattr(parent, name, replacements[child])
        attributes: dict[str, Any] = vars(parent)
        for name, value in list(attributes.items()):
            if isinstance(value, list):
                attributes[name] = [
                    replacements.get(item, item) if isinstance(item, nn.Module) else item
                    for item in value
                ]
