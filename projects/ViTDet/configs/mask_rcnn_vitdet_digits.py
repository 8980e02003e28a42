# Copyright (c) the d2_memfit developers.
"""The ViTDet of the coins, without masks, for the digits of projects/SmallerModels: pretraining.

The dataset is made by ``python projects/SmallerModels/make_digits.py output/digits/dataset``.
"""

from d2_memfit.data import register_coco

from .coins import dataloader, lr_multiplier, optimizer, train
from .mask_rcnn_vitdet_coins import model

DATASET = "output/digits/dataset"

for split in ("train", "val"):
    register_coco(f"vitdet_digits_{split}", f"{DATASET}/{split}.json", f"{DATASET}/{split}")

dataloader["train"].dataset.names = "vitdet_digits_train"
dataloader["train"].mapper.augmentations = dataloader["train"].mapper.augmentations[:1]  # no flips
dataloader["train"].mapper.use_instance_mask = False
dataloader["test"].dataset.names = "vitdet_digits_val"
dataloader["evaluator"].dataset_name = "vitdet_digits_val"

model.roi_heads.num_classes = 10
for part in ("mask_in_features", "mask_pooler", "mask_head"):
    model.roi_heads[part] = None

train.output_dir = "output/vitdet_digits"
