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
from detectron2.structures import Boxes
from numpy.typing import NDArray
from torch import nn

from ...common.patching import knows_function, replaced_functions, source_files
from ..dry_run import DryRun, is_fake, make_fake, make_real
from .compiled_operators import upright

__all__ = ["fast_matching"]

_CHUNK_SIZE = 1024  # anchors
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
        _computed[key] = _find_labels(matcher, boxes.tensor.numpy(), anchors.tensor.numpy())
    return _computed[key]


def _find_labels(
    matcher: Matcher, boxes: NDArray[Any], anchors: NDArray[Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The match and the label of each anchor, as by ``pairwise_iou`` and ``matcher``.

    Each box is compared with the anchors of the chunks that it overlaps; with all others, its IoU
    is 0. NumPy is not slowed down by a dry run's mode.
    """
    starts = np.arange(0, len(anchors), _CHUNK_SIZE)
    sides = x1, y1, x2, y2 = np.ascontiguousarray(anchors.T)
    areas = (x2 - x1) * (y2 - y1)
    low = [np.minimum.reduceat(side, starts) for side in sides]
    high = [np.maximum.reduceat(side, starts) for side in sides]
    values = np.zeros(len(anchors), areas.dtype)
    matches = np.zeros(len(anchors), np.int64)
    best_of_boxes = []
    for number, box in enumerate(boxes):
        is_near = (low[0] < box[2]) & (low[1] < box[3]) & (high[2] > box[0]) & (high[3] > box[1])
        best, found = areas.dtype.type(0), [np.arange(0)]
        for chunk in _runs(is_near):
            width = np.minimum(x2[chunk], box[2]) - np.maximum(x1[chunk], box[0])
            height = np.minimum(y2[chunk], box[3]) - np.maximum(y1[chunk], box[1])
            common = np.maximum(width, 0) * np.maximum(height, 0)
            area = (box[2] - box[0]) * (box[3] - box[1])
            iou = np.where(common > 0, common / (area + areas[chunk] - common), 0)
            np.copyto(matches[chunk], number, where=iou > values[chunk])
            np.maximum(values[chunk], iou, out=values[chunk])
            best_here = iou.max()
            if best_here > best:
                best, found = best_here, []
            if best_here == best:
                found.append(chunk.start + np.flatnonzero(iou == best))
        best_of_boxes.append(np.concatenate(found) if best > 0 else slice(None))
    # With one row, Detectron2's matcher labels anchors by their best match alone.
    labels_only = Matcher.__new__(Matcher)
    vars(labels_only).update(vars(matcher), allow_low_quality_matches=False)
    _, labels = labels_only(torch.from_numpy(values)[None])
    if matcher.allow_low_quality_matches:
        for anchors_of_box in best_of_boxes:
            labels[anchors_of_box] = 1
    return torch.from_numpy(matches), labels


def _runs(is_near: NDArray[Any]) -> list[slice]:
    """Slices of the anchors in consecutive chunks."""
    edges = np.flatnonzero(np.diff(is_near, prepend=False, append=False)) * _CHUNK_SIZE
    return [slice(begin, end) for begin, end in edges.reshape(-1, 2)]


_computed: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # some MB per image size
