"""Images in squares, as DETRs for real time are trained."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T

__all__ = ["ResizeSquare", "build_mapper", "resolutions"]


class ResizeSquare(T.ResizeShortestEdge):
    """Bring images of any shape to squares of one of some sizes, drawn at random.

    Args:
        sizes: in pixels.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(tuple(sizes), max(sizes), "choice")

    def get_transform(self, image: np.ndarray[Any, Any]) -> T.Transform:
        # Of an image that is a square: so that it is drawn where ResizeShortestEdge draws, which
        # dry runs know how to make as large as it can be.
        size = super().get_transform(np.empty((1, 1))).new_h
        return T.ResizeTransform(*image.shape[:2], size, size, self.interp)


def resolutions(cfg: CfgNode) -> list[int]:
    """Those of training, in pixels; none where images keep their shape."""
    keys = cfg.TRANSFORMERS
    if not keys.RESOLUTION:
        return []
    steps = range(-keys.MULTI_SCALE_STEPS, keys.MULTI_SCALE_STEPS + 1)
    return [keys.RESOLUTION + step * keys.MULTI_SCALE_STRIDE for step in steps]


def build_mapper(cfg: CfgNode, is_train: bool) -> DatasetMapper:
    """Detectron2's, with TRANSFORMERS.RESOLUTION in place of INPUT.MIN_SIZE_TRAIN and so on."""
    options = DatasetMapper.from_config(cfg, is_train)
    if cfg.TRANSFORMERS.RESOLUTION:
        sizes = resolutions(cfg) if is_train else [cfg.TRANSFORMERS.RESOLUTION]
        options["augmentations"] = [
            ResizeSquare(sizes) if isinstance(a, T.ResizeShortestEdge) else a
            for a in options["augmentations"]
        ]
    return DatasetMapper(**options)
