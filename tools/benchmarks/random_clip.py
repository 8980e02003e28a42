# Copyright (c) the d2_memfit developers.
"""CLIP with random weights, for models that download it: a dry run needs only shapes."""

from typing import Any

import torch
from compatibility_checks.project import load as imported

__all__ = ["load"]

# Embedding, image, layers, width and patch of the image encoder; context, vocabulary, width, heads
# and layers of the text encoder.
_SIZES = {
    "ViT-B/16": (512, 224, 12, 768, 16, 77, 49408, 512, 8, 12),
    "ViT-L/14@336px": (768, 336, 24, 1024, 14, 77, 49408, 768, 12, 12),
}


def load(
    name: str, device: Any, jit: bool = False, prompt_depth: int = 0, prompt_length: int = 0
) -> tuple[torch.nn.Module, None]:
    """Make the model of CAT-Seg's ``clip.load`` with its own code, without its file."""
    state = imported("cat_seg.third_party.model:CLIP")(*_SIZES[name]).state_dict()
    for key in ("input_resolution", "context_length", "vocab_size"):  # of the file, not the model
        state[key] = torch.tensor(0)
    build = imported("cat_seg.third_party.model_vpt:build_model")
    return build(state, prompt_depth, prompt_length).to(device), None
