"""Batches made of a worst case, and proposals and detections as bad as it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints, PolygonMasks
from torch import nn

from ..techniques.modules import knows_function, replaced_functions, source_files
from .worst_case import Size, WorstCase

__all__ = [
    "evaluation_batch",
    "tensors_of",
    "training_batch",
    "worst_detections",
    "worst_proposals",
]

# Detectron2's models that take no labels of pixels; users' own may take them.
_WITHOUT_SEM_SEG = ("GeneralizedRCNN", "ProposalNetwork", "RetinaNet")


def training_batch(cfg: CfgNode, case: WorstCase, num_images: int) -> list[dict[str, Any]]:
    """Dataset dicts of Detectron2's format, with all that its models ask of one."""
    sizes = [case.image_sizes[i % len(case.image_sizes)] for i in range(num_images)]
    if num_images == 1 and case.size_alone is not None:
        sizes = [case.size_alone]
    topk = cfg.DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TRAIN
    return [_image(cfg, size, case.num_instances, i, topk) for i, size in enumerate(sizes)]


def evaluation_batch(cfg: CfgNode, case: WorstCase) -> list[dict[str, Any]]:
    image = _image(cfg, case.test_size, 0, 0, cfg.DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TEST)
    image["height"], image["width"] = case.original_size
    return [image]


def tensors_of(batch: list[dict[str, Any]]) -> list[torch.Tensor]:
    """All that goes to the device with a batch."""
    values = [value for image in batch for value in image.values()]
    for instances in [v for v in values if isinstance(v, Instances)]:
        values += instances.get_fields().values()
    values = [getattr(value, "tensor", value) for value in values]  # of boxes, masks, keypoints
    return [value for value in values if isinstance(value, torch.Tensor)]


def _image(
    cfg: CfgNode, size: Size, num_instances: int, index: int, num_proposals: int
) -> dict[str, Any]:
    height, width = size
    boxes = _boxes(num_instances, size, seed=0)  # the same in all, for labels to be found once
    image: dict[str, Any] = {
        "image": torch.empty(3, height, width, dtype=torch.uint8),
        "height": height,
        "width": width,
        "file_name": f"worst_case_{index}",
        "image_id": index,
    }
    instances = Instances(size)
    instances.gt_boxes = Boxes(boxes)
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


def _boxes(num: int, size: Size, seed: int) -> torch.Tensor:
    """Boxes [num, 4] of all sizes, anywhere in an image."""
    generator = torch.Generator().manual_seed(seed)
    extent = torch.tensor([size[1], size[0]], dtype=torch.float32)
    corner, length = torch.rand(2, num, 2, generator=generator)
    corner, length = corner * 0.8 * extent, (length * 0.18 + 0.02) * extent
    return torch.cat([corner, corner + length], dim=1)


def _proposals(boxes: torch.Tensor, size: Size, num: int) -> Instances:
    """Half of them lie on the objects, so that they fill the quota of foreground."""
    foreground = boxes.repeat(num // max(len(boxes), 1), 1)[: num // 2]
    background = _boxes(num - len(foreground), size, seed=1)
    proposals = Instances(size)
    proposals.proposal_boxes = Boxes(torch.cat([foreground, background]))
    proposals.objectness_logits = torch.zeros(num)
    return proposals


@contextmanager
def worst_proposals(model: nn.Module, cfg: CfgNode, batch: list[dict[str, Any]]) -> Iterator[None]:
    """While open, the proposal network of a model with ROI heads finds as many proposals as the
    config allows, and half of them on objects.
    """
    generator = getattr(model, "proposal_generator", None)
    if generator is None or not hasattr(model, "roi_heads"):
        yield
        return

    def replace(module: nn.Module, args: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        rpn = cfg.MODEL.RPN
        num = rpn.POST_NMS_TOPK_TRAIN if module.training else rpn.POST_NMS_TOPK_TEST
        proposals = []
        for image in batch:
            size = tuple(image["image"].shape[1:])
            instances = image.get("instances", Instances(size, gt_boxes=Boxes(torch.empty(0, 4))))
            found = _proposals(instances.gt_boxes.tensor, size, num)
            proposals.append(found.to(output[0][0].proposal_boxes.device))
        return proposals, output[1]

    hook = generator.register_forward_hook(replace)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def worst_detections(model: nn.Module) -> Iterator[None]:
    """While open, ROI heads detect as many objects as they may, each as large as the image."""
    files = source_files(model.modules())
    has_roi_heads = knows_function(files, "fast_rcnn_inference")
    most = {"fast_rcnn_inference": lambda _: _most_detections} if has_roi_heads else {}
    with replaced_functions(files, most):
        yield


def _most_detections(
    boxes: tuple[torch.Tensor, ...],
    scores: tuple[torch.Tensor, ...],
    image_shapes: list[tuple[int, int]],
    score_thresh: float,
    nms_thresh: float,
    topk: int,
) -> tuple[list[Instances], list[torch.Tensor]]:
    """In place of Detectron2's ``fast_rcnn_inference``."""
    results, kept = [], []
    for scores_of_image, size in zip(scores, image_shapes):
        num = min(topk, len(scores_of_image))
        result = Instances(size)
        whole = scores_of_image.new_tensor([0.0, 0.0, size[1], size[0]])
        result.pred_boxes = Boxes(whole.repeat(num, 1))
        result.scores = scores_of_image[:num, 0]
        result.pred_classes = torch.zeros(num, dtype=torch.int64, device=whole.device)
        results.append(result)
        kept.append(torch.arange(num, device=whole.device))
    return results, kept
