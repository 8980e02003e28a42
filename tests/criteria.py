# Copyright (c) the d2_memfit developers.
"""Small detectors whose losses are divided as those of well-known projects are."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from detectron2.structures import Boxes, Instances
from scipy.optimize import linear_sum_assignment
from torch import nn

QUERIES, CLASSES, CHANNELS = 12, 3, 8


def is_initialized():
    return dist.is_available() and dist.is_initialized()


def get_world_size():
    return dist.get_world_size() if is_initialized() else 1


def reduce_mean(count):
    """As AdelaiDet's, for which one rank is none."""
    if get_world_size() < 2:
        return count.float()
    count = count.clone()
    dist.all_reduce(count)
    return count.float() / get_world_size()


def num_boxes_of(batch):
    """As DETR's: of the batch, in the mean of ranks."""
    num_boxes = torch.as_tensor([num_objects(batch)], dtype=torch.float)
    if is_initialized():
        dist.all_reduce(num_boxes)
    return torch.clamp(num_boxes / get_world_size(), min=1).item()


def num_objects(batch):
    return sum(len(image["instances"]) for image in batch)


class Detector(nn.Module):
    """Features of [N, 3, H, W] images."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, CHANNELS, 3, 4, 1), nn.GELU(), nn.Conv2d(CHANNELS, CHANNELS, 3, 2, 1)
        )

    def features(self, batch):
        images = torch.stack([image["image"] for image in batch]).to(next(self.parameters()).dtype)
        return self.backbone(images)


class Detr(Detector):
    """Objects found by queries, matched, and counted over the batch and all ranks: DETR,
    Deformable-DETR, Mask2Former, Sparse R-CNN.
    """

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(QUERIES, CHANNELS))
        self.attention = nn.MultiheadAttention(CHANNELS, 2, batch_first=True)
        self.classes = nn.Linear(CHANNELS, CLASSES + 1)
        self.boxes = nn.Linear(CHANNELS, 4)
        self.register_buffer("class_weights", torch.tensor([1.0] * CLASSES + [0.1]))

    def forward(self, batch):
        features = self.features(batch).flatten(2).transpose(1, 2)
        queries = self.queries.expand(len(batch), -1, -1)
        queries = queries + self.attention(queries, features, features)[0]
        logits, boxes = self.classes(queries), self.boxes(queries).sigmoid()
        targets = [image["instances"] for image in batch]
        num_boxes = num_boxes_of(batch)
        labels = torch.full(logits.shape[:2], CLASSES)
        loss_bbox = boxes.sum() * 0
        for i, target in enumerate(targets):
            wanted = target.gt_boxes.tensor.to(boxes.dtype)
            rows, columns = linear_sum_assignment(torch.cdist(boxes[i], wanted).detach())
            labels[i, rows] = target.gt_classes[columns]
            loss_bbox = loss_bbox + (boxes[i, rows] - wanted[columns]).abs().sum() / num_boxes
        loss_ce = F.cross_entropy(
            logits.transpose(1, 2), labels, self.class_weights.to(boxes.dtype)
        )
        return {"loss_ce": loss_ce, "loss_bbox": loss_bbox}


class Fcos(Detector):
    """Positions that are positive, and their centerness: FCOS, CondInst, CenterMask2."""

    def __init__(self):
        super().__init__()
        self.classes = nn.Conv2d(CHANNELS, CLASSES, 1)
        self.boxes = nn.Conv2d(CHANNELS, 4, 1)
        self.heads = nn.Conv2d(CHANNELS, 1, 1)

    def forward(self, batch):
        features = self.features(batch)
        height, width = features.shape[-2:]
        y, x = torch.meshgrid(
            (torch.arange(height) + 0.5) / height,
            (torch.arange(width) + 0.5) / width,
            indexing="ij",
        )
        wanted = torch.zeros(len(batch), CLASSES, height, width, dtype=features.dtype)
        centerness = torch.zeros(len(batch), height, width, dtype=features.dtype)
        for i, image in enumerate(batch):
            target = image["instances"]
            for (x0, y0, x1, y1), label in zip(target.gt_boxes.tensor, target.gt_classes):
                inside = (x > x0) & (x < x1) & (y > y0) & (y < y1)
                wanted[i, label][inside] = 1
                centerness[i][inside] = (0.1 + (x - x0) * (x1 - x))[inside].to(features.dtype)
        positive = wanted.amax(1) > 0
        num_positive = max(reduce_mean(positive.sum()).item(), 1.0)
        norm = max(reduce_mean(centerness.sum()).item(), 1e-6)
        logits = self.classes(features)
        loss_cls = F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum")
        distances = self.boxes(features).abs().sum(1)
        quality = self.heads(features)[:, 0]
        return {
            "loss_cls": loss_cls / num_positive,
            "loss_loc": (distances * centerness)[positive].sum() / norm,
            "loss_quality": ((quality[positive] - 0.5) ** 2).sum() / num_positive,
        }


class ClassMeans(Detector):
    """A mean over objects, weighted by their classes: no rule tells the sum of the weights."""

    cross_entropy = staticmethod(F.cross_entropy)

    def __init__(self):
        super().__init__()
        self.classes = nn.Linear(CHANNELS, CLASSES)

    def forward(self, batch):
        logits = self.classes(self.features(batch).mean((2, 3)))
        per_object = [logits[i].expand(len(x["instances"]), -1) for i, x in enumerate(batch)]
        labels = F.pad(torch.cat([x["instances"].gt_classes for x in batch]), (0, 1), value=-100)
        if len(labels) == 1:  # which is ignored
            return {"loss_cls": logits.sum() * 0}
        weights = torch.tensor([1.0, 5.0, 0.3], dtype=logits.dtype)
        logits = torch.cat([*per_object, logits[:1]])
        return {"loss_cls": self.cross_entropy(logits, labels, weights)}


def annotated_images(numbers_of_objects, seed=0, sizes=((32, 32),)):
    """Images of some sizes with so many objects each, whose boxes are shares of their size."""
    generator = torch.Generator().manual_seed(seed)
    images = []
    for i, objects in enumerate(numbers_of_objects):
        height, width = sizes[(i + seed) % len(sizes)]
        corners = torch.rand(objects, 2, generator=generator) * 0.6
        extents = 0.15 + torch.rand(objects, 2, generator=generator) * 0.25
        instances = Instances((height, width))
        instances.gt_boxes = Boxes(torch.cat([corners, corners + extents], 1))
        instances.gt_classes = torch.randint(CLASSES, (objects,), generator=generator)
        image = torch.rand(3, height, width, generator=generator)
        images.append(
            {"file_name": f"{i}.jpg", "image_id": i, "image": image, "instances": instances}
        )
    return images
