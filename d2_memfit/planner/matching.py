"""Labels of anchors, which a dry run really assigns, without the time of Detectron2's way."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from detectron2.structures import Boxes
from torch import nn

from ..techniques.modules import replaced_functions, source_files
from .dry_run import DryRun, is_hollow, make_hollow, make_real

__all__ = ["fast_matching"]

_CHUNK_SIZE = 4096
_LARGE_MATRIX = 2**22  # pairs


def fast_matching(model: nn.Module, run: DryRun) -> AbstractContextManager:
    """While open, the matrix of pairs of boxes is computed in pieces, which takes a quarter of the
    time, and written down as if it were computed at once.
    """

    def replace(pairwise_iou: Callable) -> Callable:
        def fast_pairwise_iou(boxes1: Boxes, boxes2: Boxes) -> torch.Tensor:
            tensors = [boxes1.tensor, boxes2.tensor]
            if len(boxes1) * len(boxes2) < _LARGE_MATRIX or is_hollow(tensors):
                return pairwise_iou(boxes1, boxes2)
            make_hollow(tensors)
            matrix = pairwise_iou(boxes1, boxes2)
            make_real([*tensors, matrix])
            with run.paused():
                for start in range(0, len(boxes2), _CHUNK_SIZE):
                    chunk = slice(start, start + _CHUNK_SIZE)
                    matrix[:, chunk] = pairwise_iou(boxes1, boxes2[chunk])
            return matrix

        return fast_pairwise_iou

    return replaced_functions(source_files(model.modules()), {"pairwise_iou": replace})
