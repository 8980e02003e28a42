# Copyright (c) the d2_memfit developers.
"""Tiny detectors of transformers with random weights, one of each family."""

import torch
from d2_transformers import add_transformers_config
from d2_transformers.families import FAMILIES

from d2_memfit import get_cfg

RESOLUTION = 128
NUM_QUERIES = 12

_RESNET = {"depths": [1, 1, 1, 1], "embedding_size": 16, "hidden_sizes": [16, 32, 48, 64]}
_DECODER = {
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
_HYBRID = {
    **_DECODER,
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [32, 48, 64],
    "decoder_in_channels": [32, 32, 32],
    "num_denoising": 10,
}
_DINOV2 = {
    "model_type": "rf_detr_dinov2",
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "patch_size": 16,
    "num_windows": 2,
    "image_size": RESOLUTION,
    "out_features": ["stage2", "stage4"],
}


def _resnet(kind, **values):
    return {"model_type": kind, "layer_type": "basic", **_RESNET, **values}


OPTIONS = {
    "rf_detr": {
        "backbone_config": _DINOV2,
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_ffn_dim": 64,
        "decoder_self_attention_heads": 4,
        "decoder_cross_attention_heads": 4,
        "group_detr": 3,
        "intermediate_size": 64,
        "dropout": 0.0,
    },
    "rt_detr_v2": {**_HYBRID, "backbone_config": _resnet("rt_detr_resnet", out_indices=[2, 3, 4])},
    "mask2former": {
        "backbone_config": _resnet("resnet", out_features=["stage1", "stage2", "stage3", "stage4"]),
        "feature_size": 32,
        "mask_feature_size": 32,
        "hidden_dim": 32,
        "encoder_feedforward_dim": 64,
        "encoder_layers": 1,
        "decoder_layers": 3,
        "num_attention_heads": 4,
        "dim_feedforward": 64,
        "train_num_points": 112,
    },
}

# Of each family, without masks and with them.
MODELS = [
    (kind, has_masks)
    for kind, family in FAMILIES.items()
    for has_masks in (False, True)
    if (family.mask_class if has_masks else family.box_class) is not None
]


def tiny_transformers_cfg(kind="rf_detr", has_masks=False, **options):
    cfg = get_cfg()
    add_transformers_config(cfg)
    cfg.MODEL.META_ARCHITECTURE = "TransformersDetector"
    cfg.MODEL.DEVICE = "cpu"
    cfg.MODEL.MASK_ON = has_masks
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 1
    cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD = [111.1] * 3, [48.2] * 3
    cfg.INPUT.MASK_FORMAT = "bitmask"
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.SOLVER.BASE_LR = 0.001
    cfg.SOLVER.STEPS = ()
    cfg.SOLVER.WARMUP_ITERS = 0
    cfg.SEED = 1
    cfg.TRANSFORMERS.TYPE = kind
    cfg.TRANSFORMERS.SIZE = next(iter(FAMILIES[kind].sizes))
    cfg.TRANSFORMERS.RESOLUTION = RESOLUTION
    cfg.TRANSFORMERS.NUM_QUERIES = NUM_QUERIES
    cfg.TRANSFORMERS.OPTIONS = [list(pair) for pair in {**OPTIONS[kind], **options}.items()]
    return cfg


def draw_the_same_for_each_row(monkeypatch):
    """Points of mask losses: the same for all objects, in whichever forward they are."""
    rand = torch.rand

    def repeated(*size, **kwargs):
        drawn = rand(*size, **kwargs)
        generator = torch.Generator().manual_seed(0)
        row = rand(drawn.shape[1:], generator=generator)
        return row.expand(drawn.shape).clone() if drawn.dim() > 1 else drawn

    monkeypatch.setattr(torch, "rand", repeated)
