# Copyright (c) the d2_memfit developers.
"""The families of detectors in transformers: their classes, sizes and properties."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True)
class Family:
    """One type of model.

    Attributes:
        box_class, mask_class: names of transformers' classes, without and with masks; None if there
            is none. A family without boxes has its losses from a module ``criterion``, and not in
            the output.
        sizes: values of the transformers config by size name. Other values are the class's
            defaults.
        takes_mask: whether it gets a mask of the padding. Its boxes are then relative to an image
            without padding.
    """

    box_class: Optional[str]
    mask_class: Optional[str]
    sizes: Mapping[str, Mapping[str, Any]]
    takes_mask: bool = False


# rfdetr/config.py, version 1.4, and convert_rf_detr_weights_to_hf.py of transformers. Large is that
# of version 1.3, which has two levels of features in rfdetr, and one in transformers. Decoder
# layers, pixels of a patch, windows, pixels of the position embeddings, and queries.
_RF_DETR = {
    "nano": (2, 16, 2, 384, 300),
    "small": (3, 16, 2, 512, 300),
    "base": (3, 14, 4, 518, 300),
    "medium": (4, 16, 2, 576, 300),
    "large": (3, 14, 4, 518, 300),
    "large_2026": (4, 16, 2, 704, 300),
    "seg_preview": (4, 12, 2, 432, 200),
    "seg_nano": (4, 12, 1, 312, 100),
    "seg_small": (4, 12, 2, 384, 100),
    "seg_medium": (5, 12, 2, 432, 200),
    "seg_large": (5, 12, 2, 504, 300),
    "seg_xlarge": (6, 12, 2, 624, 300),
    "seg_2xlarge": (6, 12, 2, 768, 300),
}
# convert_rt_detr_v2_weights_to_hf.py of transformers: layers of the ResNet, and of the decoder.
_RT_DETR = {
    "r18": ([2, 2, 2, 2], 3),
    "r34": ([3, 4, 6, 3], 4),
    "r50": ([3, 4, 6, 3], 6),
    "r101": ([3, 4, 23, 3], 6),
}
_STAGES = ["stage1", "stage2", "stage3", "stage4"]
_RESNET50 = {"model_type": "resnet", "depths": [3, 4, 6, 3], "out_features": _STAGES}
_SWIN = {"model_type": "swin", "drop_path_rate": 0.3, "out_features": _STAGES}
_MASK2FORMER = {
    "r50": _RESNET50,
    "swin_tiny": {**_SWIN, "depths": [2, 2, 6, 2]},
    "swin_small": {**_SWIN, "depths": [2, 2, 18, 2]},
}


def _rf_detr(name: str) -> dict[str, Any]:
    """An RF-DETR with DINOv2 small, or base if it is large."""
    layers, patch_size, num_windows, image_size, num_queries = _RF_DETR[name]
    is_large = name == "large"
    stages = (2, 5, 8, 11) if patch_size == 14 else (3, 6, 9, 12)
    backbone = {
        "model_type": "rf_detr_dinov2",
        "hidden_size": 768 if is_large else 384,
        "num_attention_heads": 12 if is_large else 6,
        "patch_size": patch_size,
        "num_windows": num_windows,
        "image_size": image_size,
        "out_features": [f"stage{i}" for i in stages],
    }
    options = {"backbone_config": backbone, "decoder_layers": layers, "decoder_n_points": 2}
    if is_large:
        options.update(decoder_n_points=4, d_model=384)
        options.update(decoder_self_attention_heads=12, decoder_cross_attention_heads=24)
    if name.startswith("seg_"):
        options.update(num_queries=num_queries, class_loss_coefficient=5.0)
    return options


def _rt_detr(name: str) -> dict[str, Any]:
    depths, layers = _RT_DETR[name]
    backbone = {"model_type": "rt_detr_resnet", "depths": depths, "out_indices": [2, 3, 4]}
    options: dict[str, Any] = {"backbone_config": backbone, "decoder_layers": layers}
    if layers < 6:  # a ResNet of blocks with two layers
        backbone.update(layer_type="basic", hidden_sizes=[64, 128, 256, 512])
        options.update(hidden_expansion=0.5, encoder_in_channels=[128, 256, 512])
    if name == "r101":
        options.update(encoder_hidden_dim=384, encoder_ffn_dim=2048)
        options.update(decoder_in_channels=[384, 384, 384])
    return options


FAMILIES = {
    "rf_detr": Family(
        "RfDetrForObjectDetection",
        "RfDetrForInstanceSegmentation",
        {name: _rf_detr(name) for name in _RF_DETR},
        takes_mask=True,
    ),
    "rt_detr_v2": Family(
        "RTDetrV2ForObjectDetection", None, {name: _rt_detr(name) for name in _RT_DETR}
    ),
    "mask2former": Family(
        None,
        "Mask2FormerForUniversalSegmentation",
        {name: {"backbone_config": backbone} for name, backbone in _MASK2FORMER.items()},
        takes_mask=True,
    ),
}
