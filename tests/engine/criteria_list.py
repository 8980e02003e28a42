# Copyright (c) the d2_memfit developers.
"""Losses as detectors have them: right and wrong under accumulation.

Which ones are wrong is not written here. ``test_loss_check.py`` computes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from criteria import CLASSES, annotated_images, num_boxes_of, num_objects, reduce_mean
from detectron2.utils.events import get_event_storage
from torch import nn

from d2_memfit import window_count

CHANNELS = 6
SIZES = ((24, 32), (32, 24), (32, 32), (16, 32))
OBJECTS = [
    (10, 3, 0, 5),
    (1, 0, 0, 12, 2),
    (0, 4, 4, 4, 1, 7),
    (2, 6, 1, 3),
    (0, 0, 5, 0, 1),
    (3, 8, 2, 5, 0, 9),
]


WINDOWS = [annotated_images(numbers, seed, SIZES) for seed, numbers in enumerate(OBJECTS)]
for _window in WINDOWS:
    for _number, _image in enumerate(_window):
        _image["image"] *= 1 + _number % 3  # they differ


@dataclass
class Criterion:
    """A loss to try.

    Attributes:
        kind: the model's class.
        options: keys of MEMFIT.NORMALIZERS.
        names: other words by which a warning may name it: state.
        is_random: whether it draws random numbers, so that only warnings are compared.
    """

    kind: Any
    options: dict = field(default_factory=dict)
    names: Sequence[str] = ()
    is_random: bool = False


CRITERIA: dict[str, Criterion] = {}


def criterion(**kwargs):
    def listed(kind):
        CRITERIA[kind.__name__] = Criterion(kind, **kwargs)
        return kind

    return listed


class Detector(nn.Module):
    """Small parts for all. ``losses`` has those of interest; "loss_image" is a mean over images.

    No image depends on its batch: each goes through the backbone alone.
    """

    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(3, CHANNELS, 3, 4, 1)
        self.scores = nn.Linear(CHANNELS, 1)
        self.boxes = nn.Linear(CHANNELS, 4)
        self.classes = nn.Linear(CHANNELS, CLASSES)
        self.quality = nn.Linear(CHANNELS, 1)

    def forward(self, batch):
        image = self.scores(self.pooled(batch)).sigmoid().mean()
        return {"loss_image": image, **self.losses(batch)}

    def losses(self, batch):
        raise NotImplementedError

    def maps(self, batch):
        """[1, C, H / 4, W / 4] of each image."""
        dtype = self.backbone.weight.dtype
        return [F.gelu(self.backbone(image["image"][None].to(dtype))) for image in batch]

    def pooled(self, batch):
        """[N, C]"""
        return torch.cat([features.mean((2, 3)) for features in self.maps(batch)])

    def cells(self, batch):
        """[H x W, C] of each image."""
        return [features[0].flatten(1).T for features in self.maps(batch)]

    def rows(self, batch):
        """[objects, C] of each image: features at the centres of its boxes, and where these are."""
        found = []
        for features, image in zip(self.maps(batch), batch):
            boxes = image["instances"].gt_boxes.tensor
            height, width = features.shape[2:]
            centers = (boxes[:, :2] + boxes[:, 2:]) / 2 * torch.tensor([width, height])
            x, y = centers.long().T
            place = torch.cat([boxes, boxes[:, :2] / 2], 1).to(features.dtype)
            found.append(features[0, :, y, x].T + place)
        return found


class Sum(Detector):
    """A sum over objects, divided by a function of the batch."""

    def __init__(self, divisor):
        super().__init__()
        self.divisor = divisor

    def losses(self, batch):
        wanted = torch.cat([image["instances"].gt_boxes.tensor for image in batch])
        off = self.boxes(torch.cat(self.rows(batch))) - wanted.to(self.boxes.weight.dtype)
        return {"loss_bbox": off.abs().sum() / self.divisor(batch)}


def own_count(batch):
    return max(num_objects(batch), 1)


for _name, _divisor, _options in (
    ("NumBoxesOverRanks", num_boxes_of, {}),  # DETR, Mask2Former, Sparse R-CNN
    ("WindowCount", lambda batch: window_count(num_objects(batch)), {}),
    ("OwnCount", own_count, {}),
    ("PlainSum", lambda batch: 1, {}),
    ("ObjectsByKey", own_count, {"losses": [["loss_bbox", "objects"]]}),
    ("SumByKey", lambda batch: 1, {"losses": [["loss_b*", "sum"]]}),
):
    CRITERIA[_name] = Criterion(partial(Sum, _divisor), _options)


@criterion()
class ClassCountsOverRanks(Detector):
    """A vector of counts, with which each class has the same weight."""

    def losses(self, batch):
        labels = torch.cat([image["instances"].gt_classes for image in batch])
        logits = self.classes(torch.cat(self.rows(batch)))
        each = F.cross_entropy(logits, labels, reduction="none")
        counts = reduce_mean(F.one_hot(labels, CLASSES).sum(0)).clamp(min=1)
        return {"loss_cls": (each / counts[labels]).sum() / CLASSES}


class ScaleGradient(torch.autograd.Function):
    """Passes values on, and a share of gradients: Cascade R-CNN."""

    @staticmethod
    def forward(ctx, features, scale):
        ctx.scale = scale
        return features.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, None


@criterion()
class GradientsByObjects(Detector):
    """Only the backward is divided by the objects of the batch: the value is right."""

    def losses(self, batch):
        pooled = ScaleGradient.apply(self.quality(self.pooled(batch)), 1 / (num_objects(batch) + 1))
        return {"loss_scaled": pooled.mean()}


@criterion(names=["queue"])
class Queue(Detector):
    """MoCo."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.randn(12, CHANNELS))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def losses(self, batch):
        pooled = self.pooled(batch)
        loss = (self.quality.weight * pooled) @ self.queue.clone().T
        first = int(self.pointer)
        places = (first + torch.arange(len(batch))) % len(self.queue)
        self.queue[places] = pooled.detach()
        self.pointer[0] = (first + len(batch)) % len(self.queue)
        return {"loss_moco": loss.exp().mean()}


@criterion(names=["teacher"])
class Teacher(Detector):
    """A teacher that follows its student in each forward."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Conv2d(3, CHANNELS, 3, 4, 1).requires_grad_(False)

    def losses(self, batch):
        self.follow()
        total = 0
        for features, image in zip(self.maps(batch), batch):
            with torch.no_grad():
                wanted = self.teacher(image["image"][None].to(features.dtype)) * 1.0
            total = total + (features - wanted).pow(2).mean()
        return {"loss_consistency": total / len(batch)}

    def follow(self):
        with torch.no_grad():
            for own, new in zip(self.teacher.parameters(), self.backbone.parameters()):
                own.mul_(0.9).add_(new, alpha=0.1)


@criterion()
class StateForTheLog(Detector):
    """A running accuracy that no loss depends on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("accuracy", torch.zeros(()))

    def losses(self, batch):
        pooled = self.pooled(batch)
        self.accuracy.mul_(0.9).add_(0.1 * (pooled.detach() > 0).double().mean())
        get_event_storage().put_scalar("accuracy", self.accuracy.item())
        return {"loss_quality": self.quality(pooled).exp().mean()}


@criterion(names=["norm", "BatchNorm1d"])
class BatchStatistics(Detector):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(CHANNELS)

    def losses(self, batch):
        cells = self.norm(torch.cat(self.cells(batch))).abs()
        sizes = [len(cells) for cells in self.cells(batch)]
        means = [self.quality(part).exp().mean() for part in cells.split(sizes)]
        return {"loss_normed": torch.stack(means).mean()}


@criterion(is_random=True)
class Dropout(Detector):
    def losses(self, batch):
        pooled = F.dropout(self.pooled(batch), 0.2, self.training)
        return {"loss_dropped": self.quality(pooled).exp().mean()}
