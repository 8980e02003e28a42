# Copyright (c) the d2_memfit developers.
"""A DETR with masks for benchmarks and tests.

Its matcher and criterion have the shape of those of DETR, Mask2Former and their descendants.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY, build_backbone
from detectron2.modeling.postprocessing import sem_seg_postprocess
from detectron2.projects.point_rend.point_features import (
    get_uncertain_point_coords_with_randomness,
    point_sample,
)
from detectron2.structures import Boxes, ImageList, Instances
from scipy.optimize import linear_sum_assignment
from torch import nn
from torchvision.ops import box_convert, generalized_box_iou

NUM_CLASSES = 4

Outputs = dict[str, Any]
Targets = list[dict[str, torch.Tensor]]
Indices = list[tuple[torch.Tensor, torch.Tensor]]
Losses = dict[str, torch.Tensor]


class HungarianMatcher(nn.Module):
    """DETR's matcher.

    Args:
        num_points: number of points at which masks are compared; 0 compares no masks.
    """

    def __init__(self, num_points: int = 0) -> None:
        super().__init__()
        self.num_points = num_points

    @torch.no_grad()
    def forward(self, outputs: Outputs, targets: Targets) -> Indices:
        bs, num_queries = outputs["pred_logits"].shape[:2]
        probabilities = outputs["pred_logits"].flatten(0, 1).softmax(-1)
        boxes = outputs["pred_boxes"].flatten(0, 1)
        labels = torch.cat([t["labels"] for t in targets])
        target_boxes = torch.cat([t["boxes"] for t in targets])
        cost = torch.cdist(boxes, target_boxes, p=1) - probabilities[:, labels]
        cost = cost - generalized_box_iou(corners(boxes), corners(target_boxes))
        cost = cost.view(bs, num_queries, -1).cpu()
        sizes = [len(t["boxes"]) for t in targets]
        costs = [c[i] for i, c in enumerate(cost.split(sizes, -1))]
        if self.num_points:
            pairs = zip(outputs["pred_masks"], targets)
            costs = [c + self.mask_costs(*pair) for c, pair in zip(costs, pairs)]
        indices = [linear_sum_assignment(c) for c in costs]
        return [(torch.as_tensor(i), torch.as_tensor(j)) for i, j in indices]

    def mask_costs(self, masks: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
        points = torch.rand(1, self.num_points, 2)
        logits = at_points(masks[:, None], points)
        values = at_points(target["masks"].to(logits)[:, None], points)
        cross = F.softplus(-logits) @ values.T + F.softplus(logits) @ (1 - values).T
        return cross / self.num_points


def corners(boxes: torch.Tensor) -> torch.Tensor:
    return box_convert(boxes, "cxcywh", "xyxy")


def at_points(masks: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """Values [N, points] of masks [N, 1, H, W] at points, of each mask or the same of all."""
    points = points.expand(len(masks), -1, -1)
    return point_sample(masks, points, align_corners=False)[:, 0]


class SetCriterion(nn.Module):
    """DETR's criterion, whose masks are compared at random points, or at all pixels.

    Args:
        num_points: points of a mask; 0 for all pixels.
    """

    def __init__(self, matcher: nn.Module, num_points: int = 0) -> None:
        super().__init__()
        self.matcher = matcher
        self.num_points = num_points

    def forward(self, outputs: Outputs, targets: Targets) -> Losses:
        num_boxes = count_over_ranks(sum(len(t["labels"]) for t in targets))
        losses = {}
        for number, layer in enumerate([outputs, *outputs.get("aux_outputs", [])]):
            indices = self.matcher({k: v for k, v in layer.items() if k != "aux_outputs"}, targets)
            for function in (self.loss_labels, self.loss_boxes, self.loss_masks):
                found = function(layer, targets, indices, num_boxes)
                losses.update({f"{k}_{number}": v for k, v in found.items()})
        return losses

    def loss_labels(self, outputs: Outputs, targets: Targets, indices: Indices, _: float) -> Losses:
        logits = outputs["pred_logits"]
        classes = torch.full(logits.shape[:2], NUM_CLASSES)
        labels = [t["labels"][j] for t, (_, j) in zip(targets, indices)]
        classes[self.queries(indices)] = torch.cat(labels)
        return {"loss_ce": F.cross_entropy(logits.transpose(1, 2), classes)}

    def loss_boxes(
        self, outputs: Outputs, targets: Targets, indices: Indices, num_boxes: float
    ) -> Losses:
        boxes = outputs["pred_boxes"][self.queries(indices)]
        target_boxes = torch.cat([t["boxes"][j] for t, (_, j) in zip(targets, indices)])
        overlap = torch.diag(generalized_box_iou(corners(boxes), corners(target_boxes)))
        distance = F.l1_loss(boxes, target_boxes, reduction="sum")
        return {"loss_bbox": distance / num_boxes, "loss_giou": (1 - overlap).sum() / num_boxes}

    def loss_masks(
        self, outputs: Outputs, targets: Targets, indices: Indices, num_masks: float
    ) -> Losses:
        """All objects' masks are padded and made to numbers, as in DETR and Mask2Former."""
        sizes = [len(t["masks"]) for t in targets]
        padded = torch.zeros(len(targets), max(sizes), *targets[0]["masks"].shape[1:])
        for of_image, target in zip(padded, targets):
            of_image[: len(target["masks"])] = target["masks"]
        logits = outputs["pred_masks"][self.queries(indices)][:, None]
        masks = padded[self.queries([(j, i) for i, j in indices])][:, None]
        if self.num_points:
            with torch.no_grad():
                points = get_uncertain_point_coords_with_randomness(
                    logits, lambda logits: -logits.abs(), self.num_points, 3, 0.75
                )
                masks = at_points(masks, points)
            logits = at_points(logits, points)
        else:
            logits = F.interpolate(logits, size=masks.shape[-2:], mode="bilinear").flatten(1)
            masks = masks.flatten(1)
        cross = F.binary_cross_entropy_with_logits(logits, masks, reduction="none").mean(1)
        scores = logits.sigmoid()
        dice = 1 - (2 * (scores * masks).sum(1) + 1) / (scores.sum(1) + masks.sum(1) + 1)
        return {"loss_mask": cross.sum() / num_masks, "loss_dice": dice.sum() / num_masks}

    def queries(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        batch = torch.cat([torch.full_like(i, number) for number, (i, _) in enumerate(indices)])
        return batch, torch.cat([i for i, _ in indices])


def count_over_ranks(count: int) -> float:
    """Mean over ranks; on one rank nothing communicates, as in DETR's descendants."""
    total = torch.as_tensor([count], dtype=torch.float32)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
        total = total / dist.get_world_size()
    return total.clamp(min=1).item()


def add_detr_config(cfg: CfgNode) -> None:
    """Add NUM_POINTS (points per mask; 0 is all pixels), PANOPTIC and other keys."""
    keys = {"NUM_OBJECT_QUERIES": 30, "NUM_POINTS": 64, "PANOPTIC": True}
    cfg.MODEL.DETR = CfgNode(keys)


@META_ARCH_REGISTRY.register()
class SmallDetr(nn.Module):
    """A Mask2Former with the mean of the image in its queries in place of a decoder."""

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__()
        self.backbone = build_backbone(cfg)
        self.num_queries = cfg.MODEL.DETR.NUM_OBJECT_QUERIES
        channels = self.backbone.output_shape()["p2"].channels
        self.queries = nn.Embedding(self.num_queries, channels)
        sizes = {"pred_logits": NUM_CLASSES + 1, "pred_boxes": 4}
        self.heads = nn.ModuleDict({k: nn.Linear(channels, size) for k, size in sizes.items()})
        num_points = cfg.MODEL.DETR.NUM_POINTS
        self.criterion = SetCriterion(HungarianMatcher(num_points), num_points)
        self.finds_panoptic = cfg.MODEL.DETR.PANOPTIC
        self.topk = cfg.TEST.DETECTIONS_PER_IMAGE
        self.to(cfg.MODEL.DEVICE)

    def forward(self, batch: list[dict[str, Any]]) -> Any:
        images = ImageList.from_tensors([d["image"].float() / 255 for d in batch], 32)
        features = self.backbone(images.tensor)["p2"]
        queries = self.queries.weight + features.mean((2, 3))[:, None]
        outputs = {name: head(queries) for name, head in self.heads.items()}
        outputs["pred_boxes"] = outputs["pred_boxes"].sigmoid()
        outputs["pred_masks"] = torch.einsum("bqc,bchw->bqhw", queries, features)
        if self.training:
            targets = [self.target(d, images.tensor.shape[-2:]) for d in batch]
            return self.criterion(outputs, targets)
        masks = F.interpolate(outputs["pred_masks"], images.tensor.shape[-2:], mode="bilinear")
        found = zip(outputs["pred_logits"], masks, images.image_sizes, batch)
        return [self.result(*of_image) for of_image in found]

    def target(self, image: dict[str, Any], size: Sequence[int]) -> dict[str, torch.Tensor]:
        instances = image["instances"]
        height, width = instances.image_size
        masks = instances.gt_masks.tensor
        scale = torch.tensor([width, height, width, height])
        return {
            "labels": instances.gt_classes,
            "boxes": box_convert(instances.gt_boxes.tensor / scale, "xyxy", "cxcywh"),
            "masks": F.pad(masks, (0, size[1] - width, 0, size[0] - height)),
        }

    def result(
        self, logits: torch.Tensor, masks: torch.Tensor, image_size: Any, image: dict[str, Any]
    ) -> dict[str, Any]:
        """Mask2Former's three kinds of results for an image."""
        masks = sem_seg_postprocess(masks, image_size, image["height"], image["width"])
        logits = logits.to(masks)
        probabilities = logits.softmax(-1)[:, :-1]
        scores, chosen = probabilities.flatten().topk(self.topk, sorted=False)
        result = Instances(masks.shape[-2:])
        result.pred_classes = chosen % NUM_CLASSES
        chosen_masks = masks[chosen // NUM_CLASSES]
        result.pred_masks = (chosen_masks > 0).float()
        result.pred_boxes = Boxes(torch.zeros(len(chosen), 4))
        inside = (chosen_masks.sigmoid().flatten(1) * result.pred_masks.flatten(1)).sum(1)
        result.scores = scores * (inside / (result.pred_masks.flatten(1).sum(1) + 1e-6))
        found = {"instances": result}
        if self.finds_panoptic:
            found["panoptic_seg"] = self.panoptic(probabilities, masks)
        return found

    def panoptic(
        self, probabilities: torch.Tensor, masks: torch.Tensor
    ) -> tuple[torch.Tensor, list[dict[str, int]]]:
        scores, labels = probabilities.max(-1)
        keep = scores.topk(len(scores) // 2).indices
        scores, masks = scores[keep], masks.sigmoid()[keep]
        number_of = (scores.view(-1, 1, 1) * masks).argmax(0)
        found: list[dict[str, int]] = []
        segments = torch.zeros(masks.shape[-2:], dtype=torch.int32)
        for k, label in enumerate(labels[keep].tolist()):
            mask = (number_of == k) & (masks[k] >= 0.5)
            if mask.sum().item() > 0:
                segments[mask] = len(found) + 1
                found.append({"id": len(found) + 1, "category_id": label})
        return segments, found
