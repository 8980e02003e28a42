# Copyright (c) the d2_memfit developers.
"""Criteria that weighting by images has right, and that guessing at counts would break."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from criteria import CHANNELS, CLASSES, Detector, Detr, annotated_images, get_world_size
from detectron2.utils.events import EventStorage
from torch import nn

from d2_memfit import AccumulatingTrainer

WINDOWS = [(7, 3, 0, 2), (1, 0, 7), (4, 4, 4, 4, 4, 4, 4), (2, 6), (0, 0, 0, 0, 1), (3, 8, 2, 5)]


class PerImage(Detector):
    """The mean over images of a loss of each image, which is a mean over its objects."""

    def __init__(self):
        super().__init__()
        self.classes = nn.Linear(CHANNELS, CLASSES)
        self.register_buffer("weights", torch.tensor([1.0, 5.0, 0.3]))

    def forward(self, batch):
        losses = []
        for features, image in zip(self.features(batch), batch):
            objects = image["instances"]
            rows = features.flatten(1).T[: len(objects)]
            losses.append(self.loss(rows, objects) if len(objects) else features.sum() * 0)
        return {"loss": torch.stack(losses).mean()}


class MeanOfMeans(PerImage):
    def loss(self, rows, objects):
        return (rows.sum(1) ** 2).mean()


class L1(PerImage):
    def loss(self, rows, objects):
        return F.l1_loss(rows, torch.ones_like(rows))


class CrossEntropy(PerImage):
    def loss(self, rows, objects):
        return F.cross_entropy(self.classes(rows), objects.gt_classes[: len(rows)])


class WeightedCrossEntropy(PerImage):
    def loss(self, rows, objects):
        weights = self.weights.to(rows.dtype)
        return F.cross_entropy(self.classes(rows), objects.gt_classes[: len(rows)], weights)


class BinaryCrossEntropy(PerImage):
    def loss(self, rows, objects):
        scores = self.classes(rows)
        return F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))


class Centred(PerImage):
    def loss(self, rows, objects):
        weights = rows.sum(1)
        return ((weights - weights.mean()) ** 2).sum() + weights.sum()


class ClampedBuffer(Detr):
    """A count over ranks, and a buffer that happens to have the same value."""

    def __init__(self):
        super().__init__()
        self.register_buffer("limit", torch.tensor([3.0]))

    def forward(self, batch):
        losses = super().forward(batch)
        self.limit.fill_(3.0)
        count = torch.tensor([float(sum(len(image["instances"]) for image in batch))])
        if dist.is_initialized():
            dist.all_reduce(count)
        count = count / get_world_size()
        # For a window with 3 objects the buffer is equal to its count.
        factor = self.limit.clamp(max=2.0) * torch.max(self.limit, dim=0)[0] / self.limit.item()
        losses["loss_features"] = self.features(batch).abs().sum() / count.clamp(min=1) * factor
        return {name: loss.sum() for name, loss in losses.items()}


class Perceptual(PerImage):
    """Features of a frozen network, compared image by image."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self.frozen.requires_grad_(False)
        self.decoder = nn.Conv2d(CHANNELS, 3, 1)

    def forward(self, batch):
        images = torch.stack([image["image"] for image in batch]).to(self.decoder.weight.dtype)
        made = F.interpolate(self.decoder(self.features(batch)), size=images.shape[-2:])
        return {"loss": F.mse_loss(self.frozen(made), self.frozen(images))}


CRITERIA = [
    MeanOfMeans,
    L1,
    CrossEntropy,
    WeightedCrossEntropy,
    BinaryCrossEntropy,
    Centred,
    ClampedBuffer,
    Perceptual,
]


class LaterCount(Detector):
    """Its count is that of the objects at first. Later a crowded image counts once more."""

    is_late = False

    def forward(self, batch):
        numbers = [len(image["instances"]) for image in batch]
        counted = [n + 1.0 if self.is_late and n > 3 else float(n) for n in numbers]
        count = torch.tensor([sum(counted)])
        if dist.is_initialized():
            dist.all_reduce(count)
        count = (count / get_world_size()).clamp(min=1).item()
        sums = self.features(batch).flatten(1).abs().sum(1)
        return {"loss": sum(n * s for n, s in zip(numbers, sums)) / count}


def gradients(kind, windows, **options):
    """The gradient of each window, from a trainer with default keys."""
    torch.manual_seed(0)
    model = kind().double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = AccumulatingTrainer(model, windows, sgd, **options)
    results = []
    with EventStorage() as storage:
        for storage.iter in range(len(windows)):
            model.is_late = storage.iter >= 2  # only LaterCount asks
            trainer.run_step()
            trained = [p for p in model.parameters() if p.requires_grad]
            results.append(torch.cat([p.grad.flatten() for p in trained if p.grad is not None]))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch_size", [1, 3])
@pytest.mark.parametrize("kind", CRITERIA)
def test_default_keys_do_not_change_the_gradient_of_one_forward(kind, micro_batch_size, log):
    windows = [annotated_images(numbers, seed) for seed, numbers in enumerate(WINDOWS)]
    full = gradients(kind, windows)
    cut = gradients(kind, windows, micro_batch_size=micro_batch_size)
    assert max(float((c - f).norm() / f.norm()) for c, f in zip(cut, full)) < 1e-5
    assert "of the gradient in micro-batches" not in log.text


def test_a_count_that_no_longer_follows_from_the_annotations_is_counted(log):
    """From the next window on. A warning says that this one was divided by another count."""
    numbers = [(7, 3, 5, 2), (1, 0, 7), (4, 4, 0, 5), (2, 6, 9), (0, 3, 8)]
    windows = [annotated_images(n, seed) for seed, n in enumerate(numbers)]
    full = gradients(LaterCount, windows)
    cut = gradients(LaterCount, windows, micro_batch_size=1)
    off = [float((c - f).norm() / f.norm()) for c, f in zip(cut, full)]
    assert max(off[:2] + off[3:]) < 1e-5
    assert off[2] > 1e-3
    assert log.text.count("no longer follows from the annotations") == 1
