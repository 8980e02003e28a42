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
            is none.
        sizes: values of the transformers config by size name. Other values are the class's
            defaults.
        takes_mask: whether it gets a mask of the padding. Its boxes are then relative to an image
            without padding.
        has_own_criterion: whether the losses come from a module ``criterion``, and not in the
            output.
        weights_losses: whether its losses have their weights already.
    """

    box_class: Optional[str]
    mask_class: Optional[str]
    sizes: Mapping[str, Mapping[str, Any]]
    takes_mask: bool = False
    has_own_criterion: bool = False
    weights_losses: bool = False


def _rf_detr(
    decoder_layers: int, patch_size: int, num_windows: int, image_size: int, is_base: bool = False
) -> dict[str, Any]:
    """An RF-DETR with DINOv2 small or base, whose position embeddings fit ``image_size`` pixels."""
    stages = (2, 5, 8, 11) if patch_size == 14 else (3, 6, 9, 12)
    backbone = {
        "model_type": "rf_detr_dinov2",
        "hidden_size": 768 if is_base else 384,
        "num_attention_heads": 12 if is_base else 6,
        "patch_size": patch_size,
        "num_windows": num_windows,
        "image_size": image_size,
        "out_features": [f"stage{i}" for i in stages],
    }
    of_large = {
        "d_model": 384,
        "decoder_self_attention_heads": 12,
        "decoder_cross_attention_heads": 24,
    }
    return {
        "backbone_config": backbone,
        "decoder_layers": decoder_layers,
        "decoder_n_points": 4 if is_base else 2,
        **(of_large if is_base else {}),
    }


def _rf_detr_seg(
    decoder_layers: int, num_queries: int, image_size: int, num_windows: int = 2
) -> dict[str, Any]:
    """An RF-DETR-Seg as released, with patches of 12 pixels."""
    return {
        **_rf_detr(decoder_layers, 12, num_windows, image_size),
        "num_queries": num_queries,
        "class_loss_coefficient": 5.0,
    }


def _rt_detr(depths: list[int], decoder_layers: int = 6, **values: Any) -> dict[str, Any]:
    backbone = {"model_type": "rt_detr_resnet", "depths": depths, "out_indices": [2, 3, 4]}
    return {"backbone_config": backbone, "decoder_layers": decoder_layers, **values}


def _small_rt_detr(depths: list[int], decoder_layers: int) -> dict[str, Any]:
    """An RT-DETR with a ResNet of two-layer blocks."""
    options = _rt_detr(depths, decoder_layers, hidden_expansion=0.5)
    options["backbone_config"].update(layer_type="basic", hidden_sizes=[64, 128, 256, 512])
    return {**options, "encoder_in_channels": [128, 256, 512]}


def _resnet(stages: list[str]) -> dict[str, Any]:
    return {"model_type": "resnet", "depths": [3, 4, 6, 3], "out_features": stages}


def _swin(depths: list[int]) -> dict[str, Any]:
    stages = ["stage1", "stage2", "stage3", "stage4"]
    return {"model_type": "swin", "depths": depths, "drop_path_rate": 0.3, "out_features": stages}


FAMILIES = {
    # rfdetr/config.py, version 1.4, and convert_rf_detr_weights_to_hf.py of transformers. Large is
    # that of version 1.3, which has two levels of features in rfdetr, and one in transformers.
    "rf_detr": Family(
        "RfDetrForObjectDetection",
        "RfDetrForInstanceSegmentation",
        {
            "nano": _rf_detr(2, 16, 2, 384),
            "small": _rf_detr(3, 16, 2, 512),
            "base": _rf_detr(3, 14, 4, 518),
            "medium": _rf_detr(4, 16, 2, 576),
            "large": _rf_detr(3, 14, 4, 518, is_base=True),
            "large_2026": _rf_detr(4, 16, 2, 704),
            "seg_preview": _rf_detr_seg(4, 200, 432),
            "seg_nano": _rf_detr_seg(4, 100, 312, num_windows=1),
            "seg_small": _rf_detr_seg(4, 100, 384),
            "seg_medium": _rf_detr_seg(5, 200, 432),
            "seg_large": _rf_detr_seg(5, 300, 504),
            "seg_xlarge": _rf_detr_seg(6, 300, 624),
            "seg_2xlarge": _rf_detr_seg(6, 300, 768),
        },
        takes_mask=True,
    ),
    # convert_rt_detr_v2_weights_to_hf.py of transformers
    "rt_detr_v2": Family(
        "RTDetrV2ForObjectDetection",
        None,
        {
            "r18": _small_rt_detr([2, 2, 2, 2], 3),
            "r34": _small_rt_detr([3, 4, 6, 3], 4),
            "r50": _rt_detr([3, 4, 6, 3]),
            "r101": _rt_detr(
                [3, 4, 23, 3],
                encoder_hidden_dim=384,
                encoder_ffn_dim=2048,
                decoder_in_channels=[384, 384, 384],
            ),
        },
        weights_losses=True,
    ),
    "d_fine": Family("DFineForObjectDetection", None, {"large": {}}, weights_losses=True),
    "deformable_detr": Family(
        "DeformableDetrForObjectDetection",
        None,
        {
            "r50": {
                "backbone_config": _resnet(["stage2", "stage3", "stage4"]),
                "auxiliary_loss": True,
            }
        },
        takes_mask=True,
    ),
    "mask2former": Family(
        None,
        "Mask2FormerForUniversalSegmentation",
        {
            "r50": {"backbone_config": _resnet(["stage1", "stage2", "stage3", "stage4"])},
            "swin_tiny": {"backbone_config": _swin([2, 2, 6, 2])},
            "swin_small": {"backbone_config": _swin([2, 2, 18, 2])},
        },
        takes_mask=True,
        has_own_criterion=True,
    ),
    "eomt": Family(None, "EomtForUniversalSegmentation", {"large": {}}, has_own_criterion=True),
}
