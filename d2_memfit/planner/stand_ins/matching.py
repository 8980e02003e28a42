# Copyright (c) the d2_memfit developers.
"""Fast matching for dry runs.

Labels of anchors are computed once for all images with the same boxes. Hungarian matching takes any
match.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha1
from typing import Any

import numpy as np
import torch
from detectron2.modeling.matcher import Matcher
from detectron2.structures import Boxes, pairwise_iou
from torch import nn

from ...common.patching import knows_function, replaced_functions, source_files
from ...techniques import ChunkedMatcher, PairwiseQuality
from ..dry_run import DryRun, is_fake, make_fake, make_real
from .compiled_operators import upright

__all__ = ["fast_matching"]

_CHUNK_SIZE = 4096
_LARGE_MATRIX = 2**20  # pairs


@contextmanager
def fast_matching(model: nn.Module, run: DryRun) -> Iterator[None]:
    """While open, record large matrices of box pairs without computing; match in chunks.

    Hungarian matching takes any match. Predictions are invented, so none is better than another.
    Their costs can be ties, which take long, or not be numbers.
    """
    pairs: dict[int, tuple[Boxes, Boxes]] = {}  # by the id of a matrix

    def without_values(pairwise_iou: Callable[..., Any]) -> Callable[..., Any]:
        def fake_pairwise_iou(boxes1: Boxes, boxes2: Boxes) -> torch.Tensor:
            tensors = [boxes1.tensor, boxes2.tensor]
            if len(boxes1) * len(boxes2) < _LARGE_MATRIX or is_fake(tensors):
                return pairwise_iou(boxes1, boxes2)
            make_fake(tensors)
            matrix = pairwise_iou(boxes1, boxes2)
            make_real(tensors)
            pairs[id(matrix)] = upright(boxes1), upright(boxes2)
            return matrix

        return fake_pairwise_iou

    call = Matcher.__call__

    def match(self: Matcher, matrix: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = call(self, matrix)
        pair = pairs.pop(id(matrix), None)
        if pair is not None:
            with run.paused():
                for result, real in zip(found, _labels(self, *pair)):
                    result.copy_(real)
            make_real(found)
        return found

    Matcher.__call__ = match
    try:
        files = source_files(model.modules())
        names = [n for n in ("pairwise_iou", "pairwise_iou_rotated") if knows_function(files, n)]
        iou = dict.fromkeys(names, without_values)
        with replaced_functions(files, iou), _assigning_at_once(files):
            yield
    finally:
        Matcher.__call__ = call


@contextmanager
def _assigning_at_once(files: list[Any]) -> Iterator[None]:
    name = "linear_sum_assignment"
    # A matcher need not be a module of the model.
    places = [
        file for file in (*files, *sys.modules.values()) if name in getattr(file, "__dict__", {})
    ]
    with replaced_functions(places, {name: _assign_at_once} if places else {}):
        yield


def _assign_at_once(_: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of ``scipy.optimize.linear_sum_assignment``."""

    def linear_sum_assignment(cost_matrix: Any, maximize: bool = False) -> tuple[Any, Any]:
        num = min(cost_matrix.shape)
        return np.arange(num), np.arange(num)

    return linear_sum_assignment


def _labels(matcher: Matcher, boxes: Boxes, anchors: Boxes) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = [t.numpy().tobytes() for t in (boxes.tensor, anchors.tensor)]
    key = sha1(repr(vars(matcher)).encode() + b"".join(tensors)).hexdigest()
    if key not in _computed:
        quality = PairwiseQuality(
            lambda rows, columns: pairwise_iou(boxes[rows], anchors[columns]),
            (len(boxes), len(anchors)),
            _CHUNK_SIZE,
        )
        _computed[key] = ChunkedMatcher(matcher)(quality)
    return _computed[key]


_computed: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # some MB per image size
