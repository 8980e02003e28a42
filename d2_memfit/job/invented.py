# Copyright (c) the d2_memfit developers.
"""Batches of Detectron2's format, made only from a config and given sizes."""

from dataclasses import dataclass
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

from .largest_images import Size, boxes_anywhere

__all__ = ["InventedBatches", "WorstCase", "rotated"]

# Detectron2's models that take no pixel labels. Users' own models may take them.
_WITHOUT_SEM_SEG = ("GeneralizedRCNN", "ProposalNetwork", "RetinaNet")


@dataclass(frozen=True)
class WorstCase:
    """Sizes and numbers of objects of the largest batch.

    Attributes:
        image_sizes: heights and widths, in pixels, of a batch's images, in turn; Detectron2 pads
            all to the largest height and width.
        num_instances: annotated objects in each image.
        test_size: size of the largest image in evaluation.
        original_size: size to which its results are resized, masks included.
    """

    image_sizes: tuple[Size, ...]
    num_instances: int
    test_size: Size
    original_size: Size


class InventedBatches:
    """Batches in the form of Detectron2's ``DatasetMapper``, without real images.

    Args:
        cfg: tells which labels there are.
        case: sizes and numbers of objects.
    """

    assumptions: tuple[str, ...] = ()
    evaluation_assumptions: tuple[str, ...] = ()
    is_guess = False
    typical = None

    def __init__(self, cfg: CfgNode, case: WorstCase) -> None:
        self._cfg = cfg
        self._case = case
        self.num_instances = case.num_instances

    def training(self, num_images: int, crosses_batches: bool = False) -> list[dict[str, Any]]:
        case = self._case
        sizes = [case.image_sizes[i % len(case.image_sizes)] for i in range(num_images)]
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
    boxes = torch.as_tensor(boxes_anywhere(num_instances, size)).float()  # the same in all images
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
        instances.gt_masks = BitMasks(_filled(boxes, size))
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
        image["proposals"] = _proposals(size, num_proposals)
    if num_instances:
        image["instances"] = instances
    return image


def rotated(boxes: torch.Tensor) -> torch.Tensor:
    """Boxes [N, 5] of ``RotatedBoxes`` for upright boxes [N, 4]."""
    corner, size = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
    return torch.cat([corner + size / 2, size, torch.zeros(len(boxes), 1)], dim=1)


def _filled(boxes: torch.Tensor, size: Size) -> torch.Tensor:
    """Masks [num, height, width] of boxes."""
    masks = torch.zeros(len(boxes), *size, dtype=torch.bool)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes.int().tolist()):
        mask[y0 : y1 + 1, x0 : x1 + 1] = True
    return masks


def _proposals(size: Size, num: int) -> Instances:
    proposals = Instances(size)
    proposals.proposal_boxes = Boxes(torch.as_tensor(boxes_anywhere(num, size, seed=1)))
    proposals.objectness_logits = torch.zeros(num)
    return proposals
