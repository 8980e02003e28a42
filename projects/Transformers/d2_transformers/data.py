# Copyright (c) the d2_memfit developers.
"""Resizing of images to squares, for the training of real-time DETRs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T

__all__ = ["ResizeSquare", "build_mapper", "resolutions"]


class ResizeSquare(T.ResizeShortestEdge):
    """Resizes images of any shape to squares of a randomly drawn size.

    Args:
        sizes: sides of the squares, in pixels.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(tuple(sizes), max(sizes), "choice")

    def get_transform(self, image: np.ndarray[Any, Any]) -> T.Transform:
        # ResizeShortestEdge of a square image draws the size, because dry runs know how to make it
        # draw the largest.
        size = super().get_transform(np.empty((1, 1))).new_h
        return T.ResizeTransform(*image.shape[:2], size, size, self.interp)


def resolutions(cfg: CfgNode) -> list[int]:
    """Training resolutions in pixels; none if images keep their shape."""
    keys = cfg.TRANSFORMERS
    if not keys.RESOLUTION:
        return []
    steps = range(-keys.MULTI_SCALE_STEPS, keys.MULTI_SCALE_STEPS + 1)
    return [keys.RESOLUTION + step * keys.MULTI_SCALE_STRIDE for step in steps]


def build_mapper(cfg: CfgNode, is_train: bool) -> DatasetMapper:
    """Build Detectron2's mapper, with TRANSFORMERS.RESOLUTION in place of INPUT.MIN_SIZE_TRAIN."""
    options = DatasetMapper.from_config(cfg, is_train)
    if cfg.TRANSFORMERS.RESOLUTION:
        sizes = resolutions(cfg) if is_train else [cfg.TRANSFORMERS.RESOLUTION]
        options["augmentations"] = [
            ResizeSquare(sizes) if isinstance(a, T.ResizeShortestEdge) else a
            for a in options["augmentations"]
        ]
    return DatasetMapper(**options)
