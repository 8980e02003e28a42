# Copyright (c) the d2_memfit developers.
"""Shared parts of this folder's configs: photographs of coins, small heads, training.

The dataset is made by ``python projects/Coins/make_dataset.py output/coins/dataset``.
"""

import detectron2.data.transforms as T
import torch
from detectron2.config import LazyCall as L
from detectron2.config import LazyConfig
from detectron2.layers import ShapeSpec
from detectron2.solver import WarmupParamScheduler
from detectron2.solver.build import get_default_optimizer_params
from fvcore.common.param_scheduler import MultiStepParamScheduler

from d2_memfit.config.files import find_config_file
from d2_memfit.data.registration import register_coco

from .lora import LowRankAdapters

DATASET = "output/coins/dataset"
CHANNELS = 64  # of the feature pyramid

for split in ("train", "val"):
    register_coco(f"vitdet_{split}", f"{DATASET}/{split}.json", f"{DATASET}/{split}")

dataloader = LazyConfig.load(find_config_file("common/data/coco.py", ".py")).dataloader
dataloader.train.dataset.names, dataloader.test.dataset.names = "vitdet_train", "vitdet_val"
dataloader.train.total_batch_size = 2
for loader in (dataloader.train, dataloader.test):
    loader.mapper.augmentations[0] = L(T.ResizeShortestEdge)(short_edge_length=160, max_size=288)
    loader.num_workers = 1
dataloader.evaluator.output_dir = "${...train.output_dir}"

heads = LazyConfig.load(find_config_file("common/models/mask_rcnn_fpn.py", ".py")).model
heads.pixel_mean, heads.pixel_std = [111.1] * 3, [48.2] * 3
heads.proposal_generator.head.in_channels = CHANNELS
heads.proposal_generator.head.num_anchors = 1
heads.proposal_generator.anchor_generator.sizes = [[16], [32], [64], [128], [256]]
heads.proposal_generator.anchor_generator.aspect_ratios = [1.0]
heads.proposal_generator.batch_size_per_image = 64
heads.proposal_generator.pre_nms_topk = (200, 100)
heads.proposal_generator.post_nms_topk = (100, 50)
heads.roi_heads.num_classes = 1
heads.roi_heads.batch_size_per_image = 32
heads.roi_heads.box_head.input_shape = ShapeSpec(channels=CHANNELS, height=7, width=7)
heads.roi_heads.box_head.fc_dims = [128, 128]
heads.roi_heads.box_predictor.input_shape = ShapeSpec(channels=128)
heads.roi_heads.mask_head.input_shape = ShapeSpec(channels=CHANNELS, height=14, width=14)
heads.roi_heads.mask_head.conv_dims = [CHANNELS] * 3

train = LazyConfig.load(find_config_file("common/train.py", ".py")).train
train.max_iter = 120
train.eval_period = 60
train.accumulation_steps = 4
train.memfit = {"oom": {"policy": "split"}}

lr_multiplier = L(WarmupParamScheduler)(
    scheduler=L(MultiStepParamScheduler)(values=[1.0, 0.1], milestones=[100], num_updates=120),
    warmup_length=20 / 120,
    warmup_factor=0.001,
)
optimizer = L(torch.optim.AdamW)(
    params=L(get_default_optimizer_params)(base_lr="${..lr}", weight_decay_norm=0.0),
    lr=5e-4,
    weight_decay=0.05,
)
