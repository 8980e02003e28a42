# Copyright (c) the d2_memfit developers.
"""Annotations as transformers' labels, and its predictions as Detectron2's Instances."""

from typing import Any, Callable

import torch
import torch.nn.functional as F
from detectron2.structures import BitMasks, Boxes, Instances, PolygonMasks
from torch import Tensor

__all__ = ["instances_of", "labels_of"]

Size = tuple[int, int]  # height and width in pixels
Resize = Callable[[Tensor, Size, int, int], Tensor]  # Detectron2's sem_seg_postprocess


def labels_of(
    objects: list[Instances], frame: Size, takes_mask: bool, has_masks: bool
) -> list[dict[str, Tensor]]:
    """Annotated objects of each image, as transformers' labels.

    Args:
        objects: "gt_boxes", "gt_classes" and, if ``has_masks``, "gt_masks".
        frame: the padded size of all images.
        takes_mask: whether boxes are relative to the image without padding, or with it.

    Returns:
        for each image "class_labels" [M], "boxes" [M, 4] as relative center, width and height, and
        "masks" [M, H, W] of the padded size.
    """
    labels = []
    for of_image in objects:
        height, width = size = of_image.image_size
        corners = of_image.gt_boxes.tensor
        centers = (corners[:, :2] + corners[:, 2:]) / 2
        extent = corners.new_tensor((size if takes_mask else frame)[::-1] * 2)
        found = {
            "class_labels": of_image.gt_classes,
            "boxes": torch.cat([centers, corners[:, 2:] - corners[:, :2]], dim=1) / extent,
        }
        if has_masks:
            masks = of_image.gt_masks
            if isinstance(masks, PolygonMasks):
                masks = BitMasks.from_polygon_masks(masks, *size)
            pixels = masks.tensor.to(corners.device)
            found["masks"] = F.pad(pixels, (0, frame[1] - width, 0, frame[0] - height))
        labels.append(found)
    return labels


def instances_of(
    output: Any, index: int, shown: tuple[float, float], size: Size, num: int, resize: Resize
) -> Instances:
    """The best detections of one image.

    A model with boxes is read as by ``post_process_object_detection`` of transformers: scores are
    sigmoids, and a query may be an object of several classes. A model with only masks is read as by
    Mask2Former's ``instance_inference``: a softmax with a last class for no object, and scores
    times the mask's mean where it is above a half. Boxes enclose the masks.

    Args:
        output: output of the model.
        index: position of the image in the batch.
        shown: share of the frame's height and width that is not padding.
        size: size of the image file, in which results are given.
        num: largest number of detections.
        resize: resizes masks to the image file, on the host with MEMFIT.EVALUATION.ON_HOST.
    """
    found = Instances(size)
    if hasattr(output, "masks_queries_logits"):
        classes = output.class_queries_logits[index].softmax(-1)[:, :-1]
        scores, queries, found.pred_classes = _best(classes, num)
        logits = output.masks_queries_logits[index][queries]
        inside = (logits > 0).flatten(1).float()
        certainty = (logits.sigmoid().flatten(1) * inside).sum(1) / (inside.sum(1) + 1e-6)
        found.scores = scores * certainty
        found.pred_masks = _in_image(logits, shown, size, resize)
        found.pred_boxes = BitMasks(found.pred_masks).get_bounding_boxes()
        return found
    found.scores, queries, found.pred_classes = _best(output.logits[index].sigmoid(), num)
    x, y, w, h = output.pred_boxes[index][queries].unbind(1)
    corners = torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], dim=1)
    found.pred_boxes = Boxes(corners * corners.new_tensor([size[1], size[0]] * 2))
    masks = getattr(output, "pred_masks", None)
    if masks is not None:
        found.pred_masks = _in_image(masks[index][queries], shown, size, resize)
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
