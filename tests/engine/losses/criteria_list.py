# Copyright (c) the d2_memfit developers.
"""Losses as detectors of the last years have them: right and wrong under accumulation.

Which ones are wrong is not written here. ``test_criteria.py`` computes it.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from detectron2.layers import FrozenBatchNorm2d, ShapeSpec
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.roi_heads.fast_rcnn import FastRCNNOutputLayers
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import get_event_storage
from fvcore.nn import giou_loss, sigmoid_focal_loss_jit
from scipy.optimize import linear_sum_assignment
from torch import nn

from d2_memfit import window_count

CHANNELS, CLASSES, LVIS, QUERIES = 6, 3, 80, 14
SIZES = ((24, 32), (32, 24), (32, 32), (16, 32))
OBJECTS = [
    (10, 3, 0, 5),
    (1, 0, 0, 12, 2),
    (0, 4, 4, 4, 1, 7),
    (2, 6, 1, 3),
    (0, 0, 5, 0, 1),
    (3, 8, 2, 5, 0, 9),
]


def annotated_images(numbers_of_objects, seed):
    """Images of several sizes with so many objects each."""
    generator = torch.Generator().manual_seed(seed)
    images = []
    for i, objects in enumerate(numbers_of_objects):
        height, width = SIZES[(i + seed) % len(SIZES)]
        scale = torch.tensor([width, height])
        corners = torch.rand(objects, 2, generator=generator) * 0.6
        sizes = 0.1 + torch.rand(objects, 2, generator=generator) * 0.3
        instances = Instances((height, width))
        instances.gt_boxes = Boxes(torch.cat([corners * scale, (corners + sizes) * scale], 1))
        instances.gt_classes = torch.randint(CLASSES, (objects,), generator=generator)
        tint = torch.rand(3, 1, 1, generator=generator) * 2 * (1 + i % 3)
        sem_seg = torch.randint(CLASSES, (height, width), generator=generator)
        sem_seg[:, width // (1 + (i + seed) % 4) :] = 255
        images.append(
            {
                "file_name": f"{i}.jpg",
                "image_id": i,
                "height": height,
                "width": width,
                "image": torch.rand(3, height, width, generator=generator) * tint,
                "instances": instances,
                "sem_seg": sem_seg,
            }
        )
    return images


WINDOWS = [annotated_images(numbers, seed) for seed, numbers in enumerate(OBJECTS)]


@dataclass
class Criterion:
    """A loss to try.

    Attributes:
        kind: the model's class.
        options: keys of MEMFIT.NORMALIZERS.
        names: other words by which a warning may name it: state, modules.
        is_random: its gradient is compared in the mean.
        is_published: COMPATIBILITY.md has its distance. A line of any level is enough.
        remedies: each of them must help.
    """

    kind: Any
    options: dict = field(default_factory=dict)
    names: Sequence[str] = ()
    is_random: bool = False
    is_published: bool = False
    remedies: dict[str, "Criterion"] = field(default_factory=dict)


CRITERIA: dict[str, Criterion] = {}


def criterion(**kwargs):
    def listed(kind):
        CRITERIA[kind.__name__] = Criterion(kind, **kwargs)
        return kind

    return listed


def remedy(*kinds, **kwargs):
    """The decorated class is what to write in place of ``kinds``."""

    def listed(new):
        for kind in kinds:
            known = CRITERIA[kind.__name__]
            told = Criterion(new, **{"is_random": known.is_random, **kwargs})
            known.remedies[new.__name__] = told
        return new

    return listed


def by_key(kind, pattern):
    """A key of the config is a remedy for ``kind``."""
    told = Criterion(kind, {"losses": [[pattern, "objects"]]})
    CRITERIA[kind.__name__].remedies["key"] = told


# What public code has in its utils.


def is_initialized():
    return dist.is_available() and dist.is_initialized()


def get_world_size():
    return dist.get_world_size() if is_initialized() else 1


def summed(count):
    """A count in the mean of ranks, without a limit."""
    count = torch.as_tensor(count, dtype=torch.float64).clone()
    if is_initialized() and get_world_size() > 1:
        dist.all_reduce(count)
    return count / get_world_size()


def num_boxes_of(batch):
    """As in DETR."""
    num_boxes = torch.as_tensor([float(num_objects(batch))], dtype=torch.float)
    if is_initialized():
        dist.all_reduce(num_boxes)
    return torch.clamp(num_boxes / get_world_size(), min=1).item()


def num_objects(batch):
    return sum(len(image["instances"]) for image in batch)


def most_objects(batch):
    return max(len(image["instances"]) for image in batch)


def classes_of(batch):
    return torch.cat([image["instances"].gt_classes for image in batch])


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

    def padded(self, batch):
        """[N, C, H, W], as of an ImageList."""
        images = [image["image"].to(self.backbone.weight.dtype) for image in batch]
        height, width = (max(image.shape[d] for image in images) for d in (1, 2))
        pads = [(0, width - i.shape[2], 0, height - i.shape[1]) for i in images]
        return F.gelu(self.backbone(torch.stack([F.pad(i, p) for i, p in zip(images, pads)])))

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
            x = ((boxes[:, 0] + boxes[:, 2]) / 8).long().clamp(0, width - 1)
            y = ((boxes[:, 1] + boxes[:, 3]) / 8).long().clamp(0, height - 1)
            place = torch.cat([boxes / 32, boxes[:, :2] / 64], 1).to(features.dtype)
            found.append(features[0, :, y, x].T + place)
        return found

    def labels(self, batch):
        """Class of each cell of each image; CLASSES outside of all boxes."""
        found = []
        for image in batch:
            height, width = (-(-side // 4) for side in image["image"].shape[1:])
            labels = torch.full((height, width), CLASSES)
            instances = image["instances"]
            for (x0, y0, x1, y1), label in zip(
                (instances.gt_boxes.tensor / 4).tolist(), instances.gt_classes.tolist()
            ):
                labels[math.floor(y0) : math.ceil(y1), math.floor(x0) : math.ceil(x1)] = label
            found.append(labels.flatten())
        return found

    def wanted_boxes(self, batch):
        """[objects, 4] of the batch, as shares of 32 pixels."""
        boxes = torch.cat([image["instances"].gt_boxes.tensor for image in batch])
        return boxes.to(self.boxes.weight.dtype) / 32

    def l1(self, batch):
        """[objects] of the batch."""
        return (self.boxes(torch.cat(self.rows(batch))) - self.wanted_boxes(batch)).abs().sum(1)

    def logits(self, batch):
        """[objects, CLASSES] of the batch."""
        return self.classes(torch.cat(self.rows(batch)))

    def cross_entropies(self, batch):
        return F.cross_entropy(self.logits(batch), classes_of(batch), reduction="none")


# Sums over objects, and what they are divided by.


class Sum(Detector):
    """A sum over objects."""

    def losses(self, batch):
        return {"loss_bbox": self.l1(batch).sum() / self.divisor(batch)}

    def divisor(self, batch):
        raise NotImplementedError


@criterion()
class NumBoxesOverRanks(Sum):
    """DETR, Mask2Former, Sparse R-CNN."""

    def divisor(self, batch):
        return num_boxes_of(batch)


@criterion()
class NumBoxesAsInteger(Sum):
    def divisor(self, batch):
        count = torch.tensor(num_objects(batch))
        if get_world_size() > 1:
            dist.all_reduce(count)
        return max(count.item() / get_world_size(), 1)


@criterion()
class WindowCount(Sum):
    def divisor(self, batch):
        return window_count(num_objects(batch))


@criterion()
class OwnCount(Sum):
    def divisor(self, batch):
        return max(num_objects(batch), 1)


by_key(OwnCount, "loss_bbox")


@criterion()
class OwnCountPlusOne(Sum):
    def divisor(self, batch):
        return num_objects(batch) + 1


@criterion()
class OwnCountPlusTen(Sum):
    def divisor(self, batch):
        return num_objects(batch) + 10


@criterion()
class ClampWithinAllReduce(Sum):
    def divisor(self, batch):
        return summed(max(num_objects(batch), 1))


@criterion()
class ClampWithinWindowCount(Sum):
    def divisor(self, batch):
        return window_count(max(num_objects(batch), 4))


@criterion()
class PlusOneWithinAllReduce(Sum):
    def divisor(self, batch):
        return summed(num_objects(batch) + 1)


@criterion()
class PlusTenWithinWindowCount(Sum):
    def divisor(self, batch):
        return window_count(num_objects(batch) + 10)


@remedy(OwnCount, ClampWithinAllReduce)
class ClampBehind(Sum):
    def divisor(self, batch):
        return summed(num_objects(batch)).clamp(min=1)


@remedy(ClampWithinWindowCount)
class LimitOfWindowCount(Sum):
    def divisor(self, batch):
        return window_count(num_objects(batch), 4)


@remedy(OwnCountPlusOne, PlusOneWithinAllReduce)
class PlusOneBehind(Sum):
    def divisor(self, batch):
        return summed(num_objects(batch)) + 1


@remedy(OwnCountPlusTen, PlusTenWithinWindowCount)
class PlusTenBehind(Sum):
    def divisor(self, batch):
        return summed(num_objects(batch)) + 10


@criterion()
class ImagesTimesMostObjects(Sum):
    """Queries that are padded to the most crowded image."""

    def divisor(self, batch):
        return summed(len(batch) * most_objects(batch)).clamp(min=1)


@criterion()
class DistinctClassesOverRanks(Sum):
    def divisor(self, batch):
        return summed(len(classes_of(batch).unique())).clamp(min=1)


@criterion()
class DistinctClassesInWindow(Sum):
    def divisor(self, batch):
        return window_count(len(classes_of(batch).unique()))


@criterion()
class SumOverWindowCountOfOne(Sum):
    def divisor(self, batch):
        return window_count(1)


@criterion()
class PlainSum(Sum):
    def divisor(self, batch):
        return 1


@criterion()
class TimesBatchSize(Sum):
    """YOLOv8's, of losses that are means over the batch."""

    def divisor(self, batch):
        return 1 / len(batch)


@remedy(PlainSum, SumOverWindowCountOfOne, TimesBatchSize)
class SumPerImage(Sum):
    def divisor(self, batch):
        return len(batch)


@criterion()
class DividedTwice(Sum):
    """A mean over objects is divided by their number again."""

    def divisor(self, batch):
        return max(num_objects(batch), 1) ** 2


@remedy(DividedTwice)
class DeclaredAndDividedTwice(Sum):
    def divisor(self, batch):
        return num_boxes_of(batch) ** 2


@criterion()
class NumBoxesTimesRanks(Sum):
    """Without a division by the number of ranks, as some forks have it."""

    def divisor(self, batch):
        return summed(num_objects(batch)).clamp(min=1) * 3


@criterion()
class RootOfNumBoxes(Sum):
    def divisor(self, batch):
        return summed(num_objects(batch)).clamp(min=1).sqrt()


@criterion()
class OfImagesWithObjects(Sum):
    """A mean over images, without those that have no objects."""

    def losses(self, batch):
        means = [
            (self.boxes(rows) ** 2).sum(1).mean() for rows in self.rows(batch) if len(rows) > 0
        ]
        total = sum(means) if means else self.boxes.weight.sum() * 0
        return {"loss_bbox": total / self.divisor(len(means))}

    def divisor(self, number):
        return max(number, 1)


@remedy(OfImagesWithObjects)
class OfImagesWithObjectsDeclared(OfImagesWithObjects):
    def divisor(self, number):
        return window_count(number)


@criterion()
class MeanOfMeans(Detector):
    """A mean over all images of means over their objects."""

    def losses(self, batch):
        means = [(self.boxes(r) ** 2).sum() / max(len(r), 1) for r in self.rows(batch)]
        return {"loss_bbox": torch.stack(means).mean()}


@criterion()
class LossOnlyWhereObjectsAre(Detector):
    """A mask head that does not run without objects."""

    def losses(self, batch):
        return {"loss_mask": self.l1(batch).mean()} if num_objects(batch) else {}


by_key(LossOnlyWhereObjectsAre, "loss_mask")


@criterion()
class DeclaredOnlyWhereObjectsAre(Detector):
    def losses(self, batch):
        num_boxes = num_boxes_of(batch)
        return {"loss_mask": self.l1(batch).sum() / num_boxes} if num_objects(batch) else {}


@criterion()
class GiouSum(Sum):
    def losses(self, batch):
        x0, y0, x1, y1 = self.wanted_boxes(batch).unbind(1)
        made = self.boxes(torch.cat(self.rows(batch))).sigmoid()
        lowest, highest = made[:, :2], made[:, :2] + made[:, 2:]
        wanted = torch.stack([x0, y0, x1, y1], 1)
        giou = giou_loss(torch.cat([lowest, highest], 1), wanted, reduction="sum")
        return {"loss_giou": giou / self.divisor(batch)}

    def divisor(self, batch):
        return num_boxes_of(batch)


@criterion()
class OwnGiou(GiouSum):
    def divisor(self, batch):
        return max(num_objects(batch), 1)


by_key(OwnGiou, "loss_giou")


@criterion()
class OwnNameLikeDetectron2s(Sum):
    """A loss of a project's own box head, whose name begins as Detectron2's."""

    def losses(self, batch):
        objects = max(num_objects(batch), 1)
        return {"loss_box_reg_own": self.l1(batch).sum() / objects}


by_key(OwnNameLikeDetectron2s, "loss_box_reg_own")


@criterion(is_published=True)
class BoxHead(Detector):
    """Detectron2's own box head, with as many proposals as an image has objects, and six."""

    def __init__(self):
        super().__init__()
        self.head = FastRCNNOutputLayers(
            ShapeSpec(channels=CHANNELS),
            box2box_transform=Box2BoxTransform(weights=(10, 10, 5, 5)),
            num_classes=CLASSES,
        )
        for weights in (self.head.bbox_pred.weight, self.head.cls_score.weight):
            nn.init.normal_(weights, std=0.1)

    def losses(self, batch):
        rows, proposals = [], []
        for cells, objects, image in zip(self.cells(batch), self.rows(batch), batch):
            instances = image["instances"]
            found = Instances(instances.image_size)
            own = instances.gt_boxes.tensor
            background = torch.tensor([[2.0, 2.0, 9.0, 9.0]]).repeat(6, 1)
            found.proposal_boxes = Boxes(torch.cat([own + 1.0, background]))
            found.gt_boxes = Boxes(torch.cat([own, background]))
            found.gt_classes = F.pad(instances.gt_classes, (0, 6), value=CLASSES)
            proposals.append(found)
            rows.append(torch.cat([objects, cells[:6]]))
        return self.head.losses(self.head(torch.cat(rows)), proposals)


@criterion()
class Keypoints(Sum):
    """Divided by the visible ones: a third of all, by where a box is."""

    def losses(self, batch):
        visible = self.wanted_boxes(batch) > 0.4
        made = (self.boxes(torch.cat(self.rows(batch))) - 0.5).abs()
        return {"loss_keypoint": made[visible].sum() / self.divisor(visible.sum())}

    def divisor(self, count):
        return summed(count).clamp(min=1)


@criterion()
class OwnKeypoints(Keypoints):
    def divisor(self, count):
        return max(int(count), 1)


@remedy(OwnKeypoints)
class KeypointsDeclared(Keypoints):
    def divisor(self, count):
        return window_count(count)


# Positive places, and their quality.


class Dense(Detector):
    """Places of all images, and which of them are positive."""

    def places(self, batch):
        return torch.cat(self.cells(batch)), torch.cat(self.labels(batch))

    def one_hot(self, labels, dtype):
        return F.one_hot(labels, CLASSES + 1)[:, :CLASSES].to(dtype)


@criterion()
class Fcos(Dense):
    """FCOS, ATSS and GFL: means over ranks of positives and of centerness."""

    def losses(self, batch):
        cells, labels = self.places(batch)
        positive = labels < CLASSES
        num_positive = summed(positive.sum()).clamp(min=1)
        centerness = (0.1 + cells.detach().sigmoid().mean(1))[positive]
        norm = summed(centerness.sum()).clamp(min=1e-6)
        logits = self.classes(cells)
        focal = sigmoid_focal_loss_jit(
            logits, self.one_hot(labels, cells.dtype), 0.25, 2.0, reduction="sum"
        )
        distances = (self.boxes(cells[positive]) - 0.3).abs().sum(1)
        quality = F.binary_cross_entropy_with_logits(
            self.quality(cells[positive])[:, 0], centerness, reduction="sum"
        )
        return {
            "loss_fcos_cls": focal / num_positive,
            "loss_fcos_loc": (distances * centerness).sum() / norm,
            "loss_fcos_ctr": quality / num_positive,
        }


@criterion()
class QualityWeights(Dense):
    """GFL: boxes are weighted by the model's own scores, without gradients."""

    def losses(self, batch):
        cells, labels = self.places(batch)
        positive = labels < CLASSES
        weights = self.classes(cells).detach().sigmoid().amax(1)[positive]
        distances = (self.boxes(cells[positive]) - 0.3).abs().sum(1)
        return {"loss_dfl": (distances * weights).sum() / self.divisor(weights.sum())}

    def divisor(self, count):
        return summed(count).clamp(min=1)


@criterion()
class TaskAligned(QualityWeights):
    """YOLOv8, TOOD: target_scores_sum."""

    def divisor(self, count):
        return max(count, 1)


@remedy(TaskAligned)
class TaskAlignedDeclared(QualityWeights):
    def divisor(self, count):
        return window_count(count)


@criterion()
class Yolo(QualityWeights):
    """The same, and times the images."""

    def losses(self, batch):
        losses = super().losses(batch)
        return {name: loss * len(batch) for name, loss in losses.items()}

    def divisor(self, count):
        return max(count, 1)


@remedy(Yolo)
class YoloDeclared(QualityWeights):
    def divisor(self, count):
        return window_count(count)


@criterion()
class OwnFocal(Dense):
    """RetinaNet without a running mean."""

    def losses(self, batch):
        cells, labels = self.places(batch)
        focal = sigmoid_focal_loss_jit(
            self.classes(cells), self.one_hot(labels, cells.dtype), 0.25, 2.0, reduction="sum"
        )
        return {"loss_cls": focal / self.divisor((labels < CLASSES).sum())}

    def divisor(self, count):
        return max(int(count), 1)


@remedy(OwnFocal)
class FocalDeclared(OwnFocal):
    def divisor(self, count):
        return window_count(count)


@criterion(names=["loss_normalizer"])
class RunningMean(OwnFocal):
    """A project's own RetinaNet, with its running mean."""

    def __init__(self):
        super().__init__()
        self.loss_normalizer = 20.0

    def divisor(self, count):
        self.loss_normalizer = 0.9 * self.loss_normalizer + 0.1 * max(int(count), 1)
        return self.loss_normalizer


@criterion(names=["running_positives"])
class RunningMeanInBuffer(OwnFocal):
    def __init__(self):
        super().__init__()
        self.register_buffer("running_positives", torch.tensor(20.0, dtype=torch.float64))

    def divisor(self, count):
        self.running_positives.mul_(0.9).add_(0.1 * count.clamp(min=1))
        return self.running_positives.clone()


@remedy(RunningMean, RunningMeanInBuffer)
class RunningMeanDeclared(FocalDeclared):
    """Its positives, without the mean over time."""


@remedy(RunningMean, RunningMeanInBuffer)
class RunningMeanFrozen(OwnFocal):
    """A number of positives per image that does not change."""

    def losses(self, batch):
        losses = super().losses(batch)
        return {name: loss / len(batch) for name, loss in losses.items()}

    def divisor(self, count):
        return 7.0


@criterion()
class SimOta(Dense):
    """YOLOX: places are matched to objects by cost, and counted in the batch."""

    def losses(self, batch):
        found, num_foreground = [], 0
        for cells, image in zip(self.cells(batch), batch):
            instances = image["instances"]
            if not len(instances):
                continue
            scores = self.classes(cells).detach().sigmoid()[:, instances.gt_classes]
            matched = scores.topk(2, dim=0).indices.flatten().unique()
            num_foreground += len(matched)
            found.append((self.boxes(cells[matched]) - 0.3).abs().sum())
        total = sum(found) if found else self.boxes.weight.sum() * 0
        return {"loss_iou": total / self.divisor(num_foreground)}

    def divisor(self, count):
        return max(count, 1)


@remedy(SimOta)
class SimOtaDeclared(SimOta):
    def divisor(self, count):
        return window_count(count)


@criterion()
class CenterNet(Dense):
    """The heat map's own rule: without objects, nothing is divided."""

    def losses(self, batch):
        cells, labels = self.places(batch)
        wanted = self.one_hot(labels, cells.dtype)
        loss = F.binary_cross_entropy_with_logits(self.classes(cells), wanted, reduction="sum")
        count = num_objects(batch)
        return {"loss_hm": loss if count == 0 else loss / count}


by_key(CenterNet, "loss_hm")


@criterion()
class CenterNet2(Dense):
    def losses(self, batch):
        cells, labels = self.places(batch)
        wanted = self.one_hot(labels, cells.dtype)
        scores = self.classes(cells).sigmoid().clamp(1e-4, 1 - 1e-4)
        num_positive = max(summed(num_objects(batch)).item(), 1.0)
        positive = -(scores.log() * (1 - scores) ** 2 * wanted).sum() / num_positive
        negative = -((1 - scores).log() * scores**2 * (1 - wanted)).sum() / num_positive
        return {"loss_centernet_pos": positive, "loss_centernet_neg": negative * 0.5}


@criterion()
class PerLevel(Dense):
    """The positives of each level are counted over ranks, in one line of code."""

    def losses(self, batch):
        cells, labels = self.places(batch)
        total = 0
        for level in range(CLASSES):
            is_here = labels == level
            distances = (self.boxes(cells[is_here]) - 0.1 * level).abs().sum()
            total = total + distances / summed(is_here.sum()).clamp(min=1)
        return {"loss_levels": total / CLASSES}


@criterion()
class OwnPerLevel(Dense):
    def losses(self, batch):
        cells, labels = self.places(batch)
        total = 0
        for level in range(CLASSES):
            is_here = labels == level
            distances = (self.boxes(cells[is_here]) - 0.1 * level).abs().sum()
            total = total + distances / max(int(is_here.sum()), 1)
        return {"loss_levels": total / CLASSES}


remedy(OwnPerLevel)(PerLevel)


@criterion()
class TwoCounts(Dense):
    """Positives and negatives, each with their own declared number."""

    def losses(self, batch):
        cells, labels = self.places(batch)
        wanted = self.one_hot(labels, cells.dtype)
        losses = F.binary_cross_entropy_with_logits(self.classes(cells), wanted, reduction="none")
        positive = labels < CLASSES
        return {
            "loss_rpn_cls": losses[positive].sum() / summed(positive.sum()).clamp(min=1)
            + losses[~positive].sum() / summed((~positive).sum()).clamp(min=1)
        }


@criterion()
class BalancedEdges(Dense):
    """Both kinds are weighted by the share of the other one in all images: HED."""

    def losses(self, batch):
        cells, labels = self.places(batch)
        positive = labels < CLASSES
        share = self.share(positive)
        weights = torch.where(positive, 1 - share, share)
        losses = F.binary_cross_entropy_with_logits(
            self.quality(cells)[:, 0], positive.to(cells.dtype), reduction="none"
        )
        return {"loss_edge": (losses * weights).sum() / len(batch)}

    def share(self, positive):
        return positive.double().mean()


@remedy(BalancedEdges)
class BalancedEdgesDeclared(BalancedEdges):
    def share(self, positive):
        return summed(positive.sum()) / summed(len(positive))


@criterion()
class Varifocal(Dense):
    """RT-DETR's and VFNet's: targets are the quality of the boxes."""

    def losses(self, batch):
        cells, labels = self.places(batch)
        quality = self.boxes(cells).detach().sigmoid().mean(1, keepdim=True)
        wanted = self.one_hot(labels, cells.dtype) * quality
        logits = self.classes(cells)
        scores = logits.detach().sigmoid()
        weights = 0.75 * scores**2 * (wanted == 0) + wanted
        loss = F.binary_cross_entropy_with_logits(logits, wanted, weights, reduction="none")
        return {"loss_vfl": loss.sum() / self.divisor(batch, wanted)}

    def divisor(self, batch, wanted):
        return num_boxes_of(batch)


@criterion()
class OwnVarifocal(Varifocal):
    def divisor(self, batch, wanted):
        return wanted.sum().clamp(min=1)


@remedy(OwnVarifocal)
class VarifocalDeclared(Varifocal):
    def divisor(self, batch, wanted):
        return window_count(wanted.sum())


# Queries.


class Matched(Detector):
    """Queries that are matched to the objects of their image."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(QUERIES, CHANNELS))
        self.no_object = nn.Linear(CHANNELS, CLASSES + 1)

    def matched(self, batch):
        """[N, queries, C], and rows and columns for each image."""
        queries = self.queries + self.pooled(batch)[:, None]
        found = []
        for boxes, image in zip(self.boxes(queries).detach(), batch):
            wanted = self.wanted_boxes([image])
            found.append(linear_sum_assignment(torch.cdist(boxes, wanted)))
        return queries, found

    def matched_l1(self, queries, found, batch):
        total = queries.sum() * 0
        for own, (rows, columns), image in zip(queries, found, batch):
            wanted = self.wanted_boxes([image])[columns]
            total = total + (self.boxes(own[rows]) - wanted).abs().sum()
        return total

    def query_labels(self, found, batch):
        labels = torch.full((len(batch), QUERIES), CLASSES)
        for own, (rows, columns), image in zip(labels, found, batch):
            own[rows] = image["instances"].gt_classes[columns]
        return labels


@criterion()
class Detr(Matched):
    """With weights of classes in a mean over all queries."""

    def losses(self, batch):
        queries, found = self.matched(batch)
        labels = self.query_labels(found, batch)
        weights = torch.tensor([1.0] * CLASSES + [0.1], dtype=queries.dtype)
        logits = self.no_object(queries).transpose(1, 2)
        num_boxes = num_boxes_of(batch)
        return {
            "loss_ce": F.cross_entropy(logits, labels, weights),
            "loss_bbox": self.matched_l1(queries, found, batch) / num_boxes,
        }


@criterion()
class DeformableDetr(Matched):
    """A focal loss, whose mean over queries is multiplied by them again."""

    def losses(self, batch):
        queries, found = self.matched(batch)
        labels = self.query_labels(found, batch)
        wanted = F.one_hot(labels, CLASSES + 1)[..., :CLASSES].to(queries.dtype)
        focal = sigmoid_focal_loss_jit(self.classes(queries), wanted, 0.25, 2.0)
        return {"loss_ce": focal.mean(1).sum() / num_boxes_of(batch) * QUERIES}


@criterion()
class MatchabilityAware(Matched):
    """D-FINE's and DEIM's loss_mal: weights from the model's own boxes."""

    def losses(self, batch):
        queries, found = self.matched(batch)
        labels = self.query_labels(found, batch)
        quality = self.boxes(queries).detach().sigmoid().mean(2, keepdim=True) ** 1.5
        one_hot = F.one_hot(labels, CLASSES + 1)[..., :CLASSES].to(queries.dtype)
        logits = self.classes(queries)
        weights = logits.detach().sigmoid() ** 1.5 * (1 - one_hot) + one_hot
        per_query = F.binary_cross_entropy_with_logits(
            logits, one_hot * quality, weights, reduction="none"
        )
        return {"loss_mal": per_query.mean(1).sum() * QUERIES / num_boxes_of(batch)}


@criterion()
class MeanOverQueries(Matched):
    """Each image has the same number of them."""

    def losses(self, batch):
        queries, found = self.matched(batch)
        labels = self.query_labels(found, batch)
        return {"loss_ce": F.cross_entropy(self.no_object(queries).transpose(1, 2), labels)}


class Denoising(Detector):
    """Queries for denoising: as many groups as the most crowded image leaves room for."""

    def noise(self, rows):
        return torch.zeros_like(rows)

    def losses(self, batch):
        most = max(most_objects(batch), 1)
        groups = max(24 // most, 1)
        queries, wanted = [], []
        for rows, image in zip(self.rows(batch), batch):
            padded = F.pad(rows, (0, 0, 0, most - len(rows)))
            labels = F.pad(image["instances"].gt_classes, (0, most - len(rows)), value=CLASSES)
            for group in range(groups):
                queries.append(padded + self.noise(padded) + 0.02 * group)
                wanted.append(F.one_hot(labels, CLASSES + 1)[:, :CLASSES])
        logits = self.classes(torch.cat(queries))
        loss = F.binary_cross_entropy_with_logits(
            logits, torch.cat(wanted).to(logits.dtype), reduction="sum"
        )
        return {"loss_vfl_dn": loss / (num_boxes_of(batch) * groups)}


@criterion()
class DenoisingGroups(Denoising):
    """Without random numbers."""


@criterion(is_random=True)
class RandomDenoisingGroups(Denoising):
    def noise(self, rows):
        return torch.randn_like(rows) * 0.5


@remedy(DenoisingGroups, RandomDenoisingGroups)
class OneGroup(Denoising):
    """A fixed number of queries: as many in each image."""

    def losses(self, batch):
        total = 0
        for rows, image in zip(self.rows(batch), batch):
            labels = F.one_hot(image["instances"].gt_classes, CLASSES)
            logits = self.classes(rows + self.noise(rows))
            total = total + F.binary_cross_entropy_with_logits(
                logits, labels.to(logits.dtype), reduction="sum"
            )
        return {"loss_vfl_dn": total / num_boxes_of(batch)}


# Masks.


class Masks(Detector):
    """[masks, cells] logits and targets: each object's mask is a pattern over its image."""

    def __init__(self):
        super().__init__()
        self.kernels = nn.Linear(CHANNELS, CHANNELS)

    def masks(self, batch):
        logits, wanted = [], []
        for cells, rows, labels in zip(self.cells(batch), self.rows(batch), self.labels(batch)):
            own = self.kernels(rows) @ cells[:24].T
            logits.append(own)
            pattern = (labels[:24] < CLASSES).expand(len(rows), -1)
            wanted.append(pattern.to(own.dtype))
        return torch.cat(logits), torch.cat(wanted)


def dice(logits, wanted):
    """[masks]"""
    made = logits.sigmoid()
    return 1 - (2 * (made * wanted).sum(-1) + 1) / (made.sum(-1) + wanted.sum(-1) + 1)


@criterion()
class DicePerMask(Masks):
    """Mask2Former's, without random points."""

    def losses(self, batch):
        logits, wanted = self.masks(batch)
        num_masks = num_boxes_of(batch)
        ce = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
        return {
            "loss_mask": ce.mean(1).sum() / num_masks + dice(logits, wanted).sum() / num_masks,
        }


@criterion()
class DiceOfBatch(Masks):
    """All masks are one."""

    def losses(self, batch):
        logits, wanted = self.masks(batch)
        return {"loss_dice": dice(logits.flatten(), wanted.flatten())}


remedy(DiceOfBatch)(DicePerMask)


@criterion(is_random=True)
class RandomPoints(Masks):
    """Mask2Former's points."""

    def losses(self, batch):
        logits, wanted = self.masks(batch)
        points = torch.rand(len(logits), 16, device=logits.device).mul(logits.shape[1]).long()
        ce = F.binary_cross_entropy_with_logits(
            logits.gather(1, points), wanted.gather(1, points), reduction="none"
        )
        return {"loss_mask": ce.mean(1).sum() / self.divisor(batch)}

    def divisor(self, batch):
        return num_boxes_of(batch)


@criterion(is_random=True)
class OwnRandomPoints(RandomPoints):
    def divisor(self, batch):
        return max(num_objects(batch), 1)


@remedy(OwnRandomPoints)
class RandomPointsDeclared(RandomPoints):
    def divisor(self, batch):
        return window_count(num_objects(batch))


@criterion(is_random=True)
class UncertainPoints(Masks):
    """PointRend's: of more random points, those where a mask is least certain."""

    def losses(self, batch):
        logits, wanted = self.masks(batch)
        points = torch.rand(len(logits), 16).mul(logits.shape[1]).long()
        uncertain = -logits.detach().gather(1, points).abs()
        points = points.gather(1, uncertain.topk(8, dim=1).indices)
        ce = F.binary_cross_entropy_with_logits(
            logits.gather(1, points), wanted.gather(1, points), reduction="none"
        )
        return {"loss_mask": ce.mean(1).sum() / num_boxes_of(batch)}


@criterion()
class Solo(Masks):
    """SOLOv2: a mean of dice over masks, and a focal loss over positives and one."""

    def losses(self, batch):
        logits, wanted = self.masks(batch)
        cells, labels = torch.cat(self.cells(batch)), torch.cat(self.labels(batch))
        focal = sigmoid_focal_loss_jit(
            self.classes(cells),
            F.one_hot(labels, CLASSES + 1)[:, :CLASSES].to(cells.dtype),
            0.25,
            2.0,
            reduction="sum",
        )
        num_masks, num_positive = self.counts(len(logits), (labels < CLASSES).sum())
        return {
            "loss_ins": dice(logits, wanted).sum() / num_masks,
            "loss_cate": focal / num_positive,
        }

    def counts(self, masks, positive):
        return masks + 1, positive + 1


@criterion()
class SoloClampWithin(Solo):
    """As someone may follow the advice."""

    def counts(self, masks, positive):
        return window_count(masks + 1), window_count(positive + 1)


@remedy(Solo, SoloClampWithin)
class SoloDeclared(Solo):
    def counts(self, masks, positive):
        return summed(masks) + 1, summed(positive) + 1


# Pixels.


class Pixels(Detector):
    """Logits of cells, and the label images at the cells' corners."""

    def pixels(self, batch):
        labels = [image["sem_seg"][::4, ::4].flatten() for image in batch]
        return [self.classes(cells) for cells in self.cells(batch)], labels


@criterion()
class LabelledPixels(Pixels):
    def losses(self, batch):
        logits, labels = map(torch.cat, self.pixels(batch))
        return {"loss_sem_seg": F.cross_entropy(logits, labels, ignore_index=255)}


class LabelledPixelsDeclared(Pixels):
    def losses(self, batch):
        logits, labels = map(torch.cat, self.pixels(batch))
        loss = F.cross_entropy(logits, labels, ignore_index=255, reduction="sum")
        return {"loss_sem_seg": loss / window_count((labels != 255).sum())}


remedy(LabelledPixels)(LabelledPixelsDeclared)


@criterion()
class WeightedPixels(Pixels):
    """Whose weights of classes declare the count."""

    def losses(self, batch):
        logits, labels = map(torch.cat, self.pixels(batch))
        weights = torch.tensor([1.0, 5.0, 0.3], dtype=logits.dtype)
        return {"loss_sem_seg": F.cross_entropy(logits, labels, weights, ignore_index=255)}


@criterion()
class NoLabelledPixels(Pixels):
    """Only pixels of objects are labelled: without any, the mean is NaN."""

    def losses(self, batch):
        logits, _ = map(torch.cat, self.pixels(batch))
        labels = torch.cat(self.labels(batch))
        labels = labels.where(labels < CLASSES, 255)
        return {"loss_sem_seg": self.loss(logits, labels)}

    def loss(self, logits, labels):
        return F.cross_entropy(logits, labels, ignore_index=255)


@remedy(NoLabelledPixels)
class NoLabelledPixelsDeclared(NoLabelledPixels):
    def loss(self, logits, labels):
        loss = F.cross_entropy(logits, labels, ignore_index=255, reduction="sum")
        return loss / window_count((labels != 255).sum())


@criterion()
class HardPixelsOfBatch(Pixels):
    """DeepLabCE."""

    def losses(self, batch):
        logits, labels = map(torch.cat, self.pixels(batch))
        losses = F.cross_entropy(logits, labels, ignore_index=255, reduction="none")
        return {"loss_sem_seg": losses.topk(len(losses) // 5).values.mean()}


@remedy(HardPixelsOfBatch)
class HardPixelsOfImages(Pixels):
    def losses(self, batch):
        means = []
        for logits, labels in zip(*self.pixels(batch)):
            losses = F.cross_entropy(logits, labels, ignore_index=255, reduction="none")
            means.append(losses.topk(len(losses) // 5).values.mean())
        return {"loss_sem_seg": torch.stack(means).mean()}


@criterion()
class HardNegatives(Dense):
    """SSD: three of the batch's hardest negatives for each positive."""

    def losses(self, batch):
        cells, labels = self.places(batch)
        losses = F.binary_cross_entropy_with_logits(
            self.quality(cells)[:, 0], (labels < CLASSES).to(cells.dtype), reduction="none"
        )
        positive, negative = losses[labels < CLASSES], losses[labels == CLASSES]
        number = min(3 * len(positive) // 4, len(negative))
        total = positive.sum() + negative.topk(number).values.sum()
        return {"loss_conf": total / self.divisor(len(positive))}

    def divisor(self, count):
        return summed(count).clamp(min=1)


@remedy(HardNegatives)
class HardNegativesPerImage(HardNegatives):
    def losses(self, batch):
        total = count = 0
        for cells, labels in zip(self.cells(batch), self.labels(batch)):
            losses = F.binary_cross_entropy_with_logits(
                self.quality(cells)[:, 0], (labels < CLASSES).to(cells.dtype), reduction="none"
            )
            positive, negative = losses[labels < CLASSES], losses[labels == CLASSES]
            number = min(3 * len(positive) // 4, len(negative))
            total = total + positive.sum() + negative.topk(number).values.sum()
            count += len(positive)
        return {"loss_conf": total / self.divisor(count)}


@criterion()
class PaddedMean(Detector):
    """A mean over padded maps."""

    def losses(self, batch):
        padded = self.padded(batch).permute(0, 2, 3, 1)
        return {"loss_depth": (self.quality(padded) - 0.5).abs().mean()}


@criterion()
class PaddedSumPerImage(Detector):
    """Images are padded, and the padding has a part in the loss."""

    def losses(self, batch):
        padded = self.padded(batch).permute(0, 2, 3, 1)
        return {"loss_depth": (self.quality(padded) - 0.5).abs().sum() / len(batch)}


@remedy(PaddedMean, PaddedSumPerImage)
class WithoutPadding(Detector):
    def losses(self, batch):
        means = [(self.quality(cells) - 0.5).abs().mean() for cells in self.cells(batch)]
        return {"loss_depth": torch.stack(means).mean()}


@criterion()
class PixelsOfBatch(Detector):
    """A mean over all pixels of images of several sizes, which are not padded."""

    def losses(self, batch):
        cells = torch.cat(self.cells(batch))
        return {"loss_depth": (self.quality(cells) - 0.5).abs().sum() / self.divisor(len(cells))}

    def divisor(self, count):
        return count


@remedy(PixelsOfBatch)
class PixelsOfBatchDeclared(PixelsOfBatch):
    def divisor(self, count):
        return window_count(count)


# Classes.


@criterion()
class ClassWeights(Detector):
    """A mean over objects, weighted by class."""

    def losses(self, batch):
        if not num_objects(batch):
            return {"loss_cls": self.classes.weight.sum() * 0}
        weights = torch.tensor([1.0, 5.0, 0.3], dtype=self.classes.weight.dtype)
        return {"loss_cls": F.cross_entropy(self.logits(batch), classes_of(batch), weights)}


@criterion()
class ClassBalanced(Detector):
    """Each class has the same weight: the mean of means over classes."""

    num_classes = CLASSES

    def losses(self, batch):
        labels = classes_of(batch)
        counts = self.counts(F.one_hot(labels, self.num_classes).sum(0))
        return {"loss_cls": (self.cross_entropies(batch) / counts[labels]).sum() / CLASSES}

    def counts(self, own):
        return own.clamp(min=1)


@criterion()
class ClassCountsOverRanks(ClassBalanced):
    """A vector of counts."""

    def counts(self, own):
        return summed(own).clamp(min=1)


remedy(ClassBalanced)(ClassCountsOverRanks)


@criterion()
class EightyClassCountsOverRanks(ClassCountsOverRanks):
    num_classes = LVIS


remedy(ClassBalanced)(EightyClassCountsOverRanks)


@criterion()
class ClassCountsWithClampWithin(ClassBalanced):
    def counts(self, own):
        return summed(own.clamp(min=1))


remedy(ClassCountsWithClampWithin)(ClassCountsOverRanks)


@criterion()
class FrequenciesOfBatch(Detector):
    """Weights of classes by how often they are in the batch, over a mean per image."""

    def losses(self, batch):
        labels = classes_of(batch)
        shares = self.shares(F.one_hot(labels, CLASSES).sum(0))
        loss = (self.cross_entropies(batch) * (1 - shares)[labels]).sum() / len(batch)
        return {"loss_cls": loss}

    def shares(self, own):
        return own / own.sum().clamp(min=1)


@remedy(FrequenciesOfBatch)
class FrequenciesDeclared(FrequenciesOfBatch):
    def shares(self, own):
        counts = summed(own)
        return counts / counts.sum().clamp(min=1)


# Images that depend on each other.


@criterion()
class PairsOfBatch(Detector):
    """SupCon over the objects of a batch."""

    def losses(self, batch):
        labels = classes_of(batch)
        features = F.normalize(self.quality.weight * torch.cat(self.rows(batch)), dim=1)
        logits = features @ features.T / 0.5
        same = (labels[:, None] == labels) & ~torch.eye(len(labels), dtype=torch.bool)
        if not same.any():
            return {"loss_contrastive": features.sum() * 0}
        return {"loss_contrastive": -logits.log_softmax(1)[same].mean()}


@criterion()
class ImagesAndTexts(Detector):
    """CLIP: which of the batch's images is each of its images."""

    def losses(self, batch):
        features = F.normalize(self.pooled(batch), dim=1)
        others = F.normalize(self.boxes(self.pooled(batch)) @ self.boxes.weight, dim=1)
        logits = features @ others.T / 0.1
        return {"loss_contrastive": F.cross_entropy(logits, torch.arange(len(batch)))}


@remedy(PairsOfBatch, ImagesAndTexts)
class PairsOfImages(Detector):
    """Objects of the same image are compared."""

    def losses(self, batch):
        total = 0
        for rows in self.rows(batch):
            features = F.normalize(self.quality.weight * rows, dim=1)
            total = total + (features @ features.T).sum() / max(len(rows), 1) ** 2
        return {"loss_contrastive": total / len(batch)}


@criterion()
class MixedImages(Detector):
    """Mixup: each image is mixed with the next one of its batch."""

    def losses(self, batch):
        pooled = self.pooled(batch)
        mixed = 0.6 * pooled + 0.4 * pooled.roll(1, 0)
        return {"loss_mixed": (4 * self.quality(mixed)).exp().mean()}


@criterion()
class AveragePrecision(Dense):
    """A ranking of all positives of the batch against all its negatives: AP loss, aLRP."""

    def losses(self, batch):
        cells, labels = self.places(batch)
        scores = self.quality(cells)[:, 0]
        positive = labels < CLASSES
        above = (scores[None] - scores[positive][:, None]).mul(4).sigmoid()
        ranks = above.sum(1)
        false = above[:, ~positive].sum(1)
        return {"loss_rank": (false / ranks).sum() / summed(positive.sum()).clamp(min=1)}


@criterion()
class LearnedWeights(Detector):
    """A mean whose weights have gradients."""

    def losses(self, batch):
        rows = torch.cat(self.rows(batch))
        weights = self.quality(rows)[:, 0].exp()
        return {"loss_attend": (weights * self.l1(batch)).sum() / (weights.sum() + 1e-6)}


@criterion()
class LogOfMean(Detector):
    def losses(self, batch):
        return {"loss_log": self.pooled(batch).abs().sum(1).mean().log()}


@criterion()
class OwnValue(Detector):
    """Each loss is divided by its own value, so that all have the value 1."""

    def losses(self, batch):
        loss = self.quality(self.pooled(batch)).exp().mean()
        return {"loss_one": loss / loss.detach()}


@criterion()
class AsLargeAsMain(Detector):
    """An auxiliary loss that is scaled to the value of the main one."""

    def losses(self, batch):
        main = self.quality(self.pooled(batch)).exp().mean()
        aux = (self.boxes(self.pooled(batch)) ** 2).mean()
        return {"loss_main": main, "loss_aux": aux * (main / aux).detach()}


@remedy(OwnValue, AsLargeAsMain)
class FixedScale(Detector):
    def losses(self, batch):
        main = self.quality(self.pooled(batch)).exp().mean()
        return {"loss_main": main, "loss_aux": 3 * (self.boxes(self.pooled(batch)) ** 2).mean()}


@criterion()
class NormalisedGradients(Detector):
    """A hook on parameters gives their gradients the norm 1, in each backward."""

    def __init__(self):
        super().__init__()
        for parameter in self.quality.parameters():
            parameter.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-6))

    def losses(self, batch):
        return {"loss_hooked": (self.quality(self.pooled(batch)) - 3).pow(2).mean()}


@remedy(NormalisedGradients)
class ScaledGradients(Detector):
    """A hook that is linear."""

    def __init__(self):
        super().__init__()
        for parameter in self.quality.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.3)

    def losses(self, batch):
        return {"loss_hooked": (self.quality(self.pooled(batch)) - 3).pow(2).mean()}


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


@remedy(GradientsByObjects)
class GradientsByNumber(Detector):
    def losses(self, batch):
        return {
            "loss_scaled": ScaleGradient.apply(self.quality(self.pooled(batch)), 1 / 3).mean(),
        }


@criterion()
class Uncertainty(Detector):
    """Weights that are learned, of losses that are means over images."""

    def __init__(self):
        super().__init__()
        self.log_variance = nn.Parameter(torch.tensor(0.3))

    def losses(self, batch):
        loss = (self.boxes(self.pooled(batch)) ** 2).mean()
        return {"loss_box": loss * (-self.log_variance).exp() + self.log_variance}


@criterion()
class UncertaintyOfOwnCount(Uncertainty):
    def losses(self, batch):
        loss = self.l1(batch).sum() / self.divisor(batch)
        return {"loss_box": loss * (-self.log_variance).exp() + self.log_variance}

    def divisor(self, batch):
        return max(num_objects(batch), 1)


@criterion()
class WeightsOnly(Detector):
    """A loss that depends on no image."""

    def losses(self, batch):
        weights = F.normalize(self.classes.weight, dim=1)
        return {"loss_orthogonal": (weights @ weights.T - torch.eye(CLASSES)).pow(2).sum()}


@criterion()
class GradientPenalty(Detector):
    """The gradients of each image's score by its own pixels."""

    def losses(self, batch):
        total = 0
        for image in batch:
            with torch.enable_grad():
                pixels = image["image"][None].to(self.backbone.weight.dtype).requires_grad_()
                score = self.quality(F.gelu(self.backbone(pixels)).mean((2, 3))).sum()
                gradient = torch.autograd.grad(score, pixels, create_graph=True)[0]
            total = total + gradient.pow(2).sum() * 10
        return {"loss_penalty": total / len(batch)}


@criterion()
class GradientPenaltyOfBatch(Detector):
    """The gradients of the batch's mean by weights."""

    def losses(self, batch):
        with torch.enable_grad():
            score = self.quality(self.pooled(batch)).exp().mean()
            gradient = torch.autograd.grad(score, self.quality.weight, create_graph=True)[0]
        return {"loss_penalty": gradient.pow(2).sum() * 10}


remedy(GradientPenaltyOfBatch)(GradientPenalty)


# State that a forward changes.


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


@criterion(names=["prototypes"])
class Prototypes(Detector):
    """OpenDet2: running means of the features of each class."""

    def __init__(self):
        super().__init__()
        self.register_buffer("prototypes", torch.randn(CLASSES, CHANNELS))

    def losses(self, batch):
        rows, labels = torch.cat(self.rows(batch)), classes_of(batch)
        with torch.no_grad():
            for label in labels.unique():
                mean = rows[labels == label].mean(0)
                self.prototypes[label] = 0.7 * self.prototypes[label] + 0.3 * mean
        distances = (self.quality.weight * rows - self.prototypes.clone()[labels]).pow(2).sum()
        return {"loss_proto": distances / num_boxes_of(batch)}


@criterion(names=["bank"])
class MemoryBank(Detector):
    """Features of earlier images in a list."""

    def __init__(self):
        super().__init__()
        self.bank = [torch.randn(CHANNELS) for _ in range(6)]

    def losses(self, batch):
        pooled = self.pooled(batch)
        known = torch.stack(self.bank).to(pooled.dtype)
        loss = ((self.quality.weight * pooled) @ known.T).exp().mean()
        self.bank = [*self.bank, *pooled.detach()][-6:]
        return {"loss_bank": loss}


@criterion(names=["history"])
class WeightAverage(Detector):
    """A loss is divided by the mean of its last values, in a list of numbers."""

    def __init__(self):
        super().__init__()
        self.history = [1.0, 2.0]

    def losses(self, batch):
        loss = self.quality(self.pooled(batch)).exp().mean()
        self.history = [*self.history, loss.item()][-4:]
        return {"loss_dwa": loss / (sum(self.history) / len(self.history))}


@criterion(names=["_iter"])
class WarmUpInBuffer(Detector):
    """BoxInst."""

    def __init__(self):
        super().__init__()
        self.register_buffer("_iter", torch.zeros([1]))

    def losses(self, batch):
        self._iter += 1
        warm_up = min(self._iter.item() / 20, 1.0)
        return {"loss_pairwise": (self.boxes(self.pooled(batch)) ** 2).mean() * warm_up}


@criterion(names=["num_forwards"])
class WarmUpInNumber(Detector):
    def __init__(self):
        super().__init__()
        self.num_forwards = 0

    def losses(self, batch):
        self.num_forwards += 1
        warm_up = min(self.num_forwards / 20, 1.0)
        return {"loss_pairwise": (self.boxes(self.pooled(batch)) ** 2).mean() * warm_up}


@remedy(WarmUpInBuffer, WarmUpInNumber)
class WarmUpByIteration(Detector):
    def losses(self, batch):
        warm_up = min((get_event_storage().iter + 1) / 20, 1.0)
        return {"loss_pairwise": (self.boxes(self.pooled(batch)) ** 2).mean() * warm_up}


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


@remedy(Teacher)
class TeacherOncePerIteration(Teacher):
    last = -1

    def follow(self):
        if self.last != get_event_storage().iter:
            super().follow()
            self.last = get_event_storage().iter


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


@remedy(BatchStatistics)
class BatchStatisticsFrozen(BatchStatistics):
    def __init__(self):
        super().__init__()
        self.norm.eval()

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


@criterion()
class FrozenBatchNorm(Detector):
    def __init__(self):
        super().__init__()
        self.norm = FrozenBatchNorm2d(CHANNELS)

    def losses(self, batch):
        means = [self.norm(features).abs().mean((2, 3)) for features in self.maps(batch)]
        return {"loss_normed": self.quality(torch.cat(means)).exp().mean()}


@remedy(BatchStatistics)
class GroupStatistics(Detector):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, CHANNELS)

    def losses(self, batch):
        means = [self.norm(features).abs().mean((2, 3)) for features in self.maps(batch)]
        return {"loss_normed": self.quality(torch.cat(means)).exp().mean()}


CRITERIA["GroupStatistics"] = Criterion(GroupStatistics)


@criterion(names=["spectral", "parametrizations", "_u", "_v"])
class SpectralNorm(Detector):
    """One step of its power iteration in each forward."""

    def __init__(self):
        super().__init__()
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(CHANNELS, CHANNELS))
        norm = self.spectral.parametrizations.weight[0]
        for vector in (norm._u, norm._v):
            vector.copy_(F.normalize(torch.randn(CHANNELS), dim=0))

    def losses(self, batch):
        return {"loss_spectral": self.quality(self.spectral(self.pooled(batch))).exp().mean()}


# Random numbers.


@criterion(is_random=True)
class Dropout(Detector):
    def losses(self, batch):
        pooled = F.dropout(self.pooled(batch), 0.2, self.training)
        return {"loss_dropped": self.quality(pooled).exp().mean()}


@criterion(is_random=True)
class DropoutOfOwnCount(Detector):
    """An error that noise may hide."""

    def losses(self, batch):
        rows = F.dropout(torch.cat(self.rows(batch)), 0.2, self.training)
        loss = (self.boxes(rows) ** 2).sum() / max(num_objects(batch), 1)
        return {"loss_dropped": loss}


by_key(DropoutOfOwnCount, "loss_dropped")
next(iter(CRITERIA["DropoutOfOwnCount"].remedies.values())).is_random = True


@criterion(is_random=True)
class StochasticDepth(Detector):
    """One draw for all images of a batch."""

    def losses(self, batch):
        pooled = self.pooled(batch)
        kept = torch.bernoulli(torch.tensor(0.9, dtype=pooled.dtype)) / 0.9
        deeper = pooled + kept * self.boxes(pooled).mean(1, keepdim=True)
        return {"loss_dropped": self.quality(deeper).exp().mean()}


@criterion(is_random=True)
class RandomNegatives(Dense):
    """Eight places of each image."""

    def losses(self, batch):
        means = []
        for cells in self.cells(batch):
            chosen = cells[torch.randperm(len(cells))[:8]]
            means.append(self.quality(chosen).exp().mean())
        return {"loss_sampled": torch.stack(means).mean()}


@criterion(is_random=True)
class RandomNegativesOfBatch(Dense):
    """As many negatives as the batch has objects, from all its images."""

    def losses(self, batch):
        cells = torch.cat(self.cells(batch))
        chosen = cells[torch.randperm(len(cells))[: num_objects(batch) + 1]]
        return {"loss_sampled": self.quality(chosen).exp().sum() / len(batch) ** 2}


@criterion(is_random=True)
class Gumbel(Detector):
    def losses(self, batch):
        noise = -torch.log(-torch.log(torch.rand(len(batch), CLASSES, dtype=torch.float64)))
        chosen = ((self.classes(self.pooled(batch)) + 0.3 * noise) / 1.0).softmax(1)
        return {"loss_chosen": (chosen * torch.arange(CLASSES)).sum(1).mean()}


# Ranks.


@criterion()
class TimesRanks(Detector):
    """Undoes the mean of DDP."""

    def losses(self, batch):
        per_image = (self.boxes(self.pooled(batch)) ** 2).mean()
        return {"loss_box": per_image * get_world_size()}


@criterion()
class NumBoxesOfAnInteger(Sum):
    """torch.distributed with a Python number, through a tensor on the device."""

    def divisor(self, batch):
        count = torch.ones(1) * num_objects(batch)
        if is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(count, op=dist.ReduceOp.SUM)
            count = count / dist.get_world_size()
        return torch.clamp(count, min=1.0)


@criterion()
class SmallDetector(Fcos):
    """A right loss of each kind together: a declared one, a mean over images, one of weights."""

    def losses(self, batch):
        weights = F.normalize(self.quality.weight, dim=1)
        return {
            **super().losses(batch),
            "loss_weights": weights.abs().sum(),
            "loss_boxes": self.l1(batch).sum() / window_count(num_objects(batch)),
        }


def copied_state(source: nn.Module, target: nn.Module) -> None:
    """Give ``target`` the parameters, buffers and plain attributes of ``source``."""
    target.load_state_dict(source.state_dict())
    for own, new in zip(source.modules(), target.modules()):
        for name, value in vars(own).items():
            is_internal = name.startswith("_") or name == "training"
            if not is_internal and isinstance(value, (int, float, list, tuple, torch.Tensor)):
                setattr(new, name, copy.deepcopy(value))


def find(name: str, remedy_name: Optional[str] = None) -> Criterion:
    found = CRITERIA[name]
    return found if remedy_name is None else found.remedies[remedy_name]
