# Copyright (c) the d2_memfit developers.
"""Batches of Detectron2's format, made only from a config and a worst case."""

from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.structures import (
    BitMasks,
    Boxes,
    Instances,
    Keypoints,
    PolygonMasks,
    RotatedBoxes,
)

from .largest_images import Size
from .worst_case import WorstCase

__all__ = ["InventedBatches", "rotated"]

# Detectron2's models that take no pixel labels. Users' own models may take them.
_WITHOUT_SEM_SEG = ("GeneralizedRCNN", "ProposalNetwork", "RetinaNet")


class InventedBatches:
    """Batches in the form of Detectron2's ``DatasetMapper``, without real images.

    Args:
        cfg: tells which labels there are.
        case: sizes and numbers of objects.
    """

    def __init__(self, cfg: CfgNode, case: WorstCase) -> None:
        self._cfg = cfg
        self._case = case
        self.num_instances = case.num_instances
        self.assumptions = case.assumptions
        self.is_guess = case.is_guess
        self.evaluation_assumptions = case.evaluation_assumptions

    def training(self, num_images: int, crosses_batches: bool = False) -> list[dict[str, Any]]:
        case = self._case
        sizes = [case.image_sizes[i % len(case.image_sizes)] for i in range(num_images)]
        if num_images == 1 and case.size_alone is not None:
            sizes = [case.size_alone]
        topk = self._cfg.DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TRAIN
        return [
            _image(self._cfg, size, case.num_instances, i, topk) for i, size in enumerate(sizes)
        ]

    def evaluation(self) -> list[dict[str, Any]]:
        topk = self._cfg.DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TEST
        image = _image(self._cfg, self._case.test_size, 0, 0, topk)
        image["height"], image["width"] = self._case.original_size
        return [image]


def _image(
    cfg: CfgNode, size: Size, num_instances: int, index: int, num_proposals: int
) -> dict[str, Any]:
    height, width = size
    boxes = _boxes(num_instances, size, seed=0)  # the same in all images: matched once
    image: dict[str, Any] = {
        "image": torch.empty(3, height, width, dtype=torch.uint8),
        "height": height,
        "width": width,
        "file_name": f"worst_case_{index}",
        "image_id": index,
    }
    instances = Instances(size)
    is_rotated = cfg.MODEL.ANCHOR_GENERATOR.NAME == "RotatedAnchorGenerator"
    instances.gt_boxes = RotatedBoxes(rotated(boxes)) if is_rotated else Boxes(boxes)
    instances.gt_classes = torch.zeros(num_instances, dtype=torch.int64)
    if cfg.MODEL.MASK_ON and cfg.INPUT.MASK_FORMAT == "bitmask":
        instances.gt_masks = BitMasks(torch.empty(num_instances, height, width, dtype=torch.bool))
    elif cfg.MODEL.MASK_ON:
        corners = boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]].double().numpy()
        instances.gt_masks = PolygonMasks([[polygon] for polygon in corners])
    if cfg.MODEL.KEYPOINT_ON:
        keypoints = torch.full((num_instances, cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS, 3), 2.0)
        keypoints[..., :2] = Boxes(boxes).get_centers()[:, None]
        instances.gt_keypoints = Keypoints(keypoints)
    if cfg.MODEL.META_ARCHITECTURE not in _WITHOUT_SEM_SEG:
        image["sem_seg"] = torch.zeros(height, width, dtype=torch.int64)
    if cfg.MODEL.LOAD_PROPOSALS:
        image["proposals"] = _proposals(boxes, size, num_proposals)
    if num_instances:
        image["instances"] = instances
    return image


def rotated(boxes: torch.Tensor) -> torch.Tensor:
    """Boxes [N, 5] of ``RotatedBoxes`` for upright boxes [N, 4]."""
    corner, size = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
    return torch.cat([corner + size / 2, size, torch.zeros(len(boxes), 1)], dim=1)


def _boxes(num: int, size: Size, seed: int) -> torch.Tensor:
    """Boxes [num, 4] of all sizes, anywhere in an image."""
    generator = torch.Generator().manual_seed(seed)
    extent = torch.tensor([size[1], size[0]], dtype=torch.float32)
    corner, length = torch.rand(2, num, 2, generator=generator)
    corner, length = corner * 0.8 * extent, (length * 0.18 + 0.02) * extent
    return torch.cat([corner, corner + length], dim=1)


def _proposals(boxes: torch.Tensor, size: Size, num: int) -> Instances:
    """Proposals, half of them on the objects, so that they fill the foreground quota."""
    foreground = boxes.repeat(num // max(len(boxes), 1), 1)[: num // 2]
    background = _boxes(num - len(foreground), size, seed=1)
    proposals = Instances(size)
    proposals.proposal_boxes = Boxes(torch.cat([foreground, background]))
    proposals.objectness_logits = torch.zeros(num)
    return proposals
