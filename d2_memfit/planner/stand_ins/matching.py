# Copyright (c) the d2_memfit developers.
"""Fast labels for dry runs.

Labels of anchors are computed once for all images with the same boxes. Hungarian matching takes any
match.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
        with (
            replaced_functions(files, iou),
            _assigning_at_once(files),
        ):
            yield
    finally:
        Matcher.__call__ = call


def _assigning_at_once(files: list[Any]) -> AbstractContextManager[None]:
    name = "linear_sum_assignment"
    # A matcher need not be a module of the model.
    places = [
        file for file in (*files, *sys.modules.values()) if name in getattr(file, "__dict__", {})
    ]
    return replaced_functions(places, {name: _assign_at_once} if places else {})


def _assign_at_once(_: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of ``scipy.optimize.linear_sum_assignment``."""

    def linear_sum_assignment(cost_matrix: Any, maximize: bool = False) -> tuple[Any, Any]:
        num = min(cost_matrix.shape)
        return np.arange(num), np.arange(num)

    return linear_sum_assignment


def _labels(matcher: Matcher, boxes: Boxes, anchors: Boxes) -> tuple[torch.Tensor, torch.Tensor]:
    ours, theirs = (np.ascontiguousarray(b.tensor.numpy()) for b in (boxes, anchors))
    digest = sha1(theirs.tobytes()).hexdigest()
    if digest not in _overlaps:
        _overlaps.clear()  # those of one image size take some 20 MB
        _overlaps[digest] = _Overlaps(theirs)
    key = digest, repr(vars(matcher)), ours.tobytes()
    if key not in _computed:
        _computed[key] = _find_labels(matcher, ours, _overlaps[digest])
    return _computed[key]


class _Overlaps:
    """IoUs of boxes with the anchors that they overlap, as by ``pairwise_iou``, once for each box.

    NumPy is not slowed down by a dry run's mode.
    """

    def __init__(self, anchors: NDArray[Any]) -> None:
        self._sides = x1, y1, x2, y2 = np.ascontiguousarray(anchors.T)
        self.areas = (x2 - x1) * (y2 - y1)
        self._known: dict[bytes, Any] = {}

    def of(self, box: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """The indices of the anchors, and their IoUs."""
        key = box.tobytes()
        if key not in self._known:
            x1, y1, x2, y2 = self._sides
            width = np.minimum(x2, box[2]) - np.maximum(x1, box[0])
            height = np.minimum(y2, box[3]) - np.maximum(y1, box[1])
            near = np.flatnonzero((width > 0) & (height > 0)).astype(np.int32)
            common = width[near] * height[near]
            area = (box[2] - box[0]) * (box[3] - box[1])
            self._known[key] = near, common / (area + self.areas[near] - common)
        return self._known[key]


def _find_labels(
    matcher: Matcher, boxes: NDArray[Any], overlaps: _Overlaps
) -> tuple[torch.Tensor, torch.Tensor]:
    """The match and the label of each anchor, as by ``pairwise_iou`` and ``matcher``."""
    values = np.zeros_like(overlaps.areas)
    matches = np.zeros(len(values), np.int64)
    best_of_boxes: list[Any] = []
    for number, box in enumerate(boxes):
        near, iou = overlaps.of(box)
        is_better = iou > values[near]
        matches[near[is_better]] = number
        values[near[is_better]] = iou[is_better]
        # The best IoU of a box that overlaps nothing is 0, which it has with all anchors.
        best_of_boxes.append(near[iou == iou.max()] if len(near) else slice(None))
    # With one row, Detectron2's matcher labels anchors by their best match alone.
    labels_only = Matcher.__new__(Matcher)
    vars(labels_only).update(vars(matcher), allow_low_quality_matches=False)
    _, labels = labels_only(torch.from_numpy(values)[None])
    if matcher.allow_low_quality_matches:
        for anchors_of_box in best_of_boxes:
            labels[anchors_of_box] = 1
    return torch.from_numpy(matches), labels


_overlaps: dict[str, _Overlaps] = {}  # by a digest of the anchors
_computed: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}  # some MB per image size
