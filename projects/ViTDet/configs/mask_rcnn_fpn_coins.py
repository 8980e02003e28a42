# Copyright (c) the d2_memfit developers.
"""A small Mask R-CNN with a ResNet-18 and FPN, for Detectron2 v0.6 and main."""

from .coins import CHANNELS, dataloader, heads, lr_multiplier, optimizer, train

model = heads
model.backbone.bottom_up.stem.norm = "GN"
stages = model.backbone.bottom_up.stages
stages.depth, stages.norm = 18, "GN"
del stages.stride_in_1x1  # only for blocks with three layers; a ResNet-18's have two
model.backbone.out_channels, model.backbone.norm = CHANNELS, "GN"

train.output_dir = "output/fpn"
train.memfit = {"checkpoint": {"modules": ["backbone"]}}
