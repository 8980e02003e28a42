#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Estimate and plan the training of torchvision's Faster R-CNN R50-FPN, without a GPU.

python projects/Torchvision/plan.py [--budget-gb 6] [--images 8]
"""

import argparse

import torch
from torch import nn
from torch.optim import SGD
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from train_detection import detection_losses

from d2_memfit import Job, plan_memory
from d2_memfit.planner.text import answer_of_plan


def build_model() -> nn.Module:
    """Build ``fasterrcnn_resnet50_fpn`` as with pretrained weights: three trained stages."""
    backbone = resnet_fpn_backbone(backbone_name="resnet50", weights=None, trainable_layers=3)
    return FasterRCNN(backbone, num_classes=91)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget-gb", type=float, default=6)
    parser.add_argument("--images", type=int, default=8)
    args = parser.parse_args()
    boxes = torch.rand(20, 4) * 300 + torch.tensor([0.0, 0.0, 310.0, 310.0])
    target = {"boxes": boxes, "labels": torch.ones(20, dtype=torch.int64)}
    job = Job(
        model=build_model,
        optimizer=lambda model: SGD(model.parameters(), lr=0.02, momentum=0.9),
        images_per_batch=args.images,
        batch=([torch.zeros(3, 800, 1333)], [target]),
        loss_fn=detection_losses,
    )
    print(answer_of_plan(plan_memory(job, budget_gb=args.budget_gb)))


if __name__ == "__main__":
    main()
