# Copyright (c) the d2_memfit developers.
"""Predictions of transformers' detectors as Detectron2's Instances."""

from typing import Any, Callable

import torch
from detectron2.structures import BitMasks, Boxes, Instances
from torch import Tensor

__all__ = ["instances_of_boxes", "instances_of_masks"]

Size = tuple[int, int]  # height and width in pixels
Resize = Callable[[Tensor, Size, int, int], Tensor]  # Detectron2's sem_seg_postprocess


def instances_of_boxes(
    output: Any, index: int, shown: tuple[float, float], size: Size, num: int, resize: Resize
) -> Instances:
    """The best detections of one image by a model with boxes, and masks if it has any.

    It follows ``post_process_object_detection`` of transformers: scores are sigmoids, and a query
    may be an object of several classes.

    Args:
        output: output of the model.
        index: position of the image in the batch.
        shown: share of the frame's height and width that is not padding.
        size: size of the image file, in which results are given.
        num: largest number of detections.
        resize: resizes masks to the image file, on the host with MEMFIT.EVALUATION.ON_HOST.
    """
    scores, queries, classes = _best(output.logits[index].sigmoid(), num)
    x, y, w, h = output.pred_boxes[index][queries].unbind(1)
    corners = torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], dim=1)
    found = Instances(size)
    found.pred_boxes = Boxes(corners * corners.new_tensor([size[1], size[0]] * 2))
    found.pred_boxes.clip(size)
    found.scores, found.pred_classes = scores, classes
    masks = getattr(output, "pred_masks", None)
    if masks is not None:
        found.pred_masks = _in_image(masks[index][queries], shown, size, resize)
    return found


def instances_of_masks(
    output: Any, index: int, shown: tuple[float, float], size: Size, num: int, resize: Resize
) -> Instances:
    """The best detections of one image by a model with only masks.

    It follows Mask2Former's ``instance_inference``: a softmax with a last class for no object, and
    scores times the mask's mean where it is above a half. Boxes enclose the masks.

    Args:
        output, index, shown, size, num, resize: as for :func:`instances_of_boxes`.
    """
    scores, queries, classes = _best(output.class_queries_logits[index].softmax(-1)[:, :-1], num)
    logits = output.masks_queries_logits[index][queries]
    inside = (logits > 0).flatten(1).float()
    certainty = (logits.sigmoid().flatten(1) * inside).sum(1) / (inside.sum(1) + 1e-6)
    found = Instances(size)
    found.pred_masks = _in_image(logits, shown, size, resize)
    found.pred_boxes = BitMasks(found.pred_masks).get_bounding_boxes()
    found.scores, found.pred_classes = scores * certainty, classes
    return found


def _best(scores: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, queries and classes [num] of the best of [queries, classes]."""
    num_classes = scores.shape[1]
    best, index = scores.float().flatten().topk(min(num, scores.numel()))
    return best, torch.div(index, num_classes, rounding_mode="floor"), index % num_classes


def _in_image(logits: Tensor, shown: tuple[float, float], size: Size, resize: Resize) -> Tensor:
    """Masks [num, height, width] of an image file, from logits of the padded frame.

    They are made one by one, because they are four times as large in floating point.
    """
    height, width = (max(round(n * s), 1) for n, s in zip(logits.shape[-2:], shown))
    masks: Any = None
    for i, of_object in enumerate(logits.float()):
        mask = resize(of_object[None], (height, width), *size) > 0
        masks = mask.new_empty(len(logits), *size) if masks is None else masks
        masks[i] = mask[0]
    return masks
