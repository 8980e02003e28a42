# Copyright (c) the d2_memfit developers.
"""Detectron2's dataset dicts in the form that transformers takes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from detectron2.structures import BitMasks, ImageList, Instances, PolygonMasks
from torch import Tensor

__all__ = ["Images", "images_of", "labels_of"]

Labels = dict[str, Tensor]
Size = tuple[int, int]  # height and width in pixels


class Images(NamedTuple):
    pixels: Tensor  # [N, 3, H, W], normalised, padded with zeros
    sizes: list[Size]  # without padding

    @property
    def mask(self) -> Tensor:
        """A mask [N, H, W]: 1 for pixels of an image, 0 for padding."""
        height, width = self.pixels.shape[-2:]
        mask = torch.zeros(len(self.sizes), height, width, dtype=torch.long)
        for of_image, (h, w) in zip(mask, self.sizes):
            of_image[:h, :w] = 1
        return mask.to(self.pixels.device)


def images_of(
    batch: list[dict[str, Any]],
    mean: Tensor,
    std: Tensor,
    resolutions: Sequence[int],
    size_divisibility: int,
) -> Images:
    """Make one tensor of normalised images.

    Args:
        batch: with "image", [3, H, W], values 0 to 255.
        mean, std: [3, 1, 1]
        resolutions: sides of squares, in pixels. All images get the size of the first if that is
            one of these, as with this project's mapper, otherwise the middle one. If there are
            none, images are padded to a multiple of ``size_divisibility``.
    """
    images = [(d["image"].to(mean.device) - mean) / std for d in batch]
    if resolutions:
        height, width = images[0].shape[-2:]
        is_known = height == width and height in resolutions
        side = height if is_known else sorted(resolutions)[len(resolutions) // 2]
        for i, image in enumerate(images):
            if image.shape[-2:] != (side, side):
                images[i] = F.interpolate(image[None], (side, side), mode="bilinear")[0]
    padded = ImageList.from_tensors(images, 1 if resolutions else size_divisibility)
    return Images(padded.tensor, padded.image_sizes)


def labels_of(
    objects: list[Instances], images: Images, takes_mask: bool, has_masks: bool
) -> list[Labels]:
    """Annotated objects of each image, as transformers' labels.

    Args:
        objects: "gt_boxes", "gt_classes" and, if ``has_masks``, "gt_masks", of any kind.
        takes_mask: whether boxes are relative to the image without padding, or with it.

    Returns:
        for each image "class_labels" [M], "boxes" [M, 4] as relative center, width and height, and
        "masks" [M, H, W] of the padded size.
    """
    height, width = images.pixels.shape[-2:]
    device = images.pixels.device
    labels = []
    for of_image, size in zip(objects, images.sizes):
        own = of_image.image_size  # which differs from the batch's if all were resized to one
        scale = (1.0, 1.0) if takes_mask else (height / size[0], width / size[1])
        extent = torch.tensor([own[1] * scale[1], own[0] * scale[0]] * 2, device=device)
        corners = of_image.gt_boxes.tensor.to(device)
        centers = (corners[:, :2] + corners[:, 2:]) / 2
        found = {
            "class_labels": of_image.gt_classes.to(device),
            "boxes": torch.cat([centers, corners[:, 2:] - corners[:, :2]], dim=1) / extent,
        }
        if has_masks:
            masks = _bitmasks(of_image.gt_masks, own).to(device)
            if own != size:
                masks = F.interpolate(masks[:, None].float(), size=size, mode="nearest")[:, 0] > 0
            found["masks"] = F.pad(masks, (0, width - size[1], 0, height - size[0]))
        labels.append(found)
    return labels


def _bitmasks(masks: Any, size: Size) -> Tensor:
    """Masks [M, H, W] from Detectron2's BitMasks, PolygonMasks, or a tensor."""
    if isinstance(masks, PolygonMasks):
        masks = BitMasks.from_polygon_masks(masks, *size)
    return masks.tensor if isinstance(masks, BitMasks) else masks
