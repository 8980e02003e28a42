# Copyright (c) the d2_memfit developers.
"""A technique of a project: low-rank adapters, which train.memfit.lora_rank turns on.

A config that imports this file has the key: ``from .lora import LowRankAdapters``.
"""

from typing import Any, Optional

import torch
from torch import nn

from d2_memfit.common.errors import ConfigError
from d2_memfit.techniques.recipes import pretrained_part
from d2_memfit.techniques.registry import TECHNIQUES
from d2_memfit.techniques.technique import Technique

__all__ = ["LowRankAdapters"]

# They use the weights of their layers, but never or not always call the layers.
_WITHOUT_CALLS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class LowRankAdapters(Technique):
    """Trains two small matrices for each linear layer of the backbone, whose weights are frozen.

    Saves gradients and optimizer states of the backbone: 12 bytes per parameter with AdamW. Costs a
    few percent of time, and keeps activations. Needs peft. Checkpoints have the merged weights, for
    plain Detectron2, and the others, for a resumed run.

    Source: Hu et al., "LoRA", arXiv:2106.09685; peft's LoraConfig.

    Key: Rank of the matrices, such as 8. The linear layers are those of the backbone's pretrained
    part, such as a ViT or Swin; its other parameters are frozen. None: no matrices.
    """

    tier, key, needs = "recipe", "MEMFIT.LORA_RANK", frozenset({"evaluation"})
    changes = (
        "the backbone learns updates of a low rank; it needs pretrained weights, and a higher "
        "learning rate"
    )

    def suggest(self, job: Any, model: nn.Module) -> Optional[int]:
        return 8 if job.is_pretrained and _linear_layers(model) else None

    def apply(self, model: nn.Module, rank: int) -> nn.Module:
        layers = _linear_layers(model)
        if not layers:
            raise ConfigError(f"{self.key} is for linear layers, and the backbone has none")
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as e:
            raise ConfigError(f"{self.key} needs peft ({e}): pip install peft") from e
        backbone = model.get_submodule(pretrained_part(model))
        # Nothing else of the backbone is trained from here on.
        inject_adapter_in_model(
            LoraConfig(r=rank, lora_alpha=rank, target_modules=layers), backbone
        )
        for name in layers:
            adapted = backbone.get_submodule(name)
            adapted.register_state_dict_post_hook(_add_merged)
            adapted.register_load_state_dict_pre_hook(_take_plain)
        return model


def _linear_layers(model: nn.Module) -> list[str]:
    """Names of the linear layers in the pretrained part of a model's backbone."""
    backbone = model.get_submodule(pretrained_part(model))
    return [
        f"{parent_name}.{child_name}".lstrip(".")
        for parent_name, parent in backbone.named_modules()
        for child_name, child in parent.named_children()
        if type(child) is nn.Linear and not isinstance(parent, _WITHOUT_CALLS)
    ]


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


if all(technique.name != "LowRankAdapters" for technique in TECHNIQUES):
    TECHNIQUES.append(LowRankAdapters())
