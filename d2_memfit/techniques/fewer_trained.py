# Copyright (c) the d2_memfit developers.
"""Fewer trained parameters: a frozen backbone, and small trained matrices next to its layers."""

from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import FrozenBatchNorm2d
from torch import nn

from ..errors import ConfigError
from .modules import find_modules
from .registry import TECHNIQUES, ModulesTechnique, PositiveIntTechnique

__all__ = ["FrozenModules", "LowRankAdapters"]

_BACKBONE = "backbone"
# Parts with pretrained weights in Detectron2's FPN, in its ViTDet, and in models of transformers.
_PRETRAINED = (
    *("backbone.bottom_up", "backbone.net"),
    *("backbone.backbone", "backbone.model", "pixel_level_module.encoder"),
)
# They use the weights of their layers, but never or not always call the layers.
_WITHOUT_CALLS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@TECHNIQUES.register()
class FrozenModules(ModulesTechnique):
    """Freezes modules at their pretrained weights, as Detectron2 does with stages of a ResNet.

    Saves their gradients and optimizer states, and their activations if nothing before them is
    trained.

    Source: Detectron2's MODEL.BACKBONE.FREEZE_AT, which knows ResNets only.

    Key: The modules that are frozen. Give patterns of their names, or "backbone", which is the
    pretrained part of the backbone: a feature pyramid is trained. [] is none.
    """

    tier = "recipe"
    changes = (
        "they do not learn, and batch norms keep their statistics; they need pretrained weights, "
        "which are near the new task"
    )
    part = "model"
    order = -2  # before modules get adapters and other classes
    key = "MEMFIT.FINE_TUNE.FROZEN"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        settings = {cls.key: [_BACKBONE], LowRankAdapters.key: None}
        return settings if cfg.MODEL.WEIGHTS else {}

    @classmethod
    def apply(cls, model: nn.Module, cfg: CfgNode) -> nn.Module:
        patterns = [
            _pretrained_part(model, cls.key) if pattern == _BACKBONE else pattern
            for pattern in cfg.MEMFIT.FINE_TUNE.FROZEN
        ]
        for module in find_modules(model, cls.key, patterns):
            module.requires_grad_(False)
            FrozenBatchNorm2d.convert_frozen_batchnorm(module)
        return model


@TECHNIQUES.register()
class LowRankAdapters(PositiveIntTechnique):
    """Trains two small matrices for each linear layer of the backbone, whose weights are frozen.

    Saves gradients and optimizer states of the backbone: 12 bytes per parameter with AdamW. Costs a
    few percent of time, and keeps activations. Needs peft. Checkpoints have the merged weights, for
    plain Detectron2, and the others, for a resumed run.

    Source: Hu et al., "LoRA", arXiv:2106.09685; peft's LoraConfig.

    Key: Rank of the matrices, such as 8. The linear layers are those of the backbone's pretrained
    part, such as a ViT or Swin; its other parameters are frozen. None: no matrices.
    """

    tier = "recipe"
    changes = (
        "the backbone learns updates of a low rank; it needs pretrained weights, and a higher "
        "learning rate"
    )
    part = "model"
    order = -1
    in_evaluation = True
    key = "MEMFIT.FINE_TUNE.LORA_RANK"

    @classmethod
    def enabling_settings(cls, cfg: CfgNode) -> dict[str, Any]:
        return {cls.key: 8} if cfg.MODEL.WEIGHTS else {}

    @classmethod
    def apply(cls, model: nn.Module, cfg: CfgNode) -> nn.Module:
        rank = cfg.MEMFIT.FINE_TUNE.LORA_RANK
        name = _pretrained_part(model, cls.key)
        backbone = model.get_submodule(name)
        linear = [
            f"{parent_name}.{child_name}".lstrip(".")
            for parent_name, parent in backbone.named_modules()
            for child_name, child in parent.named_children()
            if type(child) is nn.Linear and not isinstance(parent, _WITHOUT_CALLS)
        ]
        if not linear:
            raise ConfigError(
                f"{cls.key} is for linear layers, and {name} has none. MEMFIT.FINE_TUNE.FROZEN "
                "freezes any layers. Set it None"
            )
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as e:
            raise ConfigError(f"{cls.key} needs peft ({e}): pip install peft") from e
        # Nothing else of the backbone is trained from here on.
        inject_adapter_in_model(
            LoraConfig(r=rank, lora_alpha=rank, target_modules=linear), backbone
        )
        for name in linear:
            adapted = backbone.get_submodule(name)
            adapted.register_state_dict_post_hook(_add_merged)
            adapted.register_load_state_dict_pre_hook(_take_plain)
        return model


def _pretrained_part(model: nn.Module, key: str) -> str:
    """Name of the part of a model's backbone that has pretrained weights."""
    names = [name for name, _ in model.named_modules()]
    for part in (*_PRETRAINED, _BACKBONE):
        for name in names:
            if f".{name}".endswith(f".{part}"):
                return name
    raise ConfigError(f"{key}: the model has no module named {_BACKBONE}")


def _add_merged(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Add the weights of the layer without adapters, on the CPU."""
    with torch.no_grad():
        (adapter,) = module.active_adapters
        merged = module.base_layer.weight + module.get_delta_weight(adapter)
        state[f"{prefix}weight"] = merged.cpu()
    if module.base_layer.bias is not None:
        state[f"{prefix}bias"] = state[f"{prefix}base_layer.bias"]


def _take_plain(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Use the weights of a layer without adapters, unless there are weights with adapters."""
    for name in ("weight", "bias"):
        value = state.pop(prefix + name, None)
        if value is not None:
            state.setdefault(f"{prefix}base_layer.{name}", value)
