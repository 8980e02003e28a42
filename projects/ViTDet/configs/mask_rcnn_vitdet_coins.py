# Copyright (c) the d2_memfit developers.
"""A small ViTDet: Mask R-CNN with a ViT-Tiny, for Detectron2 main with timm."""

from functools import partial

from detectron2.config import LazyCall as L
from detectron2.modeling import SimpleFeaturePyramid, ViT
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from torch import nn

from .coins import CHANNELS, dataloader, heads, lr_multiplier, optimizer, train

SIZE = 288  # pixels; all images are padded to it

model = heads
model.backbone = L(SimpleFeaturePyramid)(
    net=L(ViT)(
        img_size=SIZE,
        patch_size=16,
        embed_dim=192,
        depth=12,
        num_heads=3,
        norm_layer=partial(nn.LayerNorm, eps=1e-6),
        use_rel_pos=True,
        window_size=9,
        window_block_indexes=[0, 1, 3, 4, 6, 7, 9, 10],
        out_feature="last_feat",
    ),
    in_feature="${.net.out_feature}",
    out_channels=CHANNELS,
    scale_factors=(4.0, 2.0, 1.0, 0.5),
    top_block=L(LastLevelMaxPool)(),
    norm="LN",
    square_pad=SIZE,
)

train.output_dir = "output/vitdet"
train.memfit = {"checkpoint": {"modules": ["backbone.net.blocks.*"]}}
