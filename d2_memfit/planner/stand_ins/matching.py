# Copyright (c) the d2_memfit developers.
"""Fast labels for dry runs.

Labels of anchors are computed once for all images with the same boxes, and masks of objects once
for all proposals with the same box. Hungarian matching takes any match.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha1
from typing import Any

import numpy as np
import torch
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher
from detectron2.structures import Boxes, masks
from numpy.typing import NDArray
from torch import nn

from ...common.patching import (
    knows_function,
    modules_with,
    replaced_functions,
    replaced_together,
    source_files,
)
from ..dry_run import DryRun, is_fake, make_fake, make_real
from .compiled_operators import upright

__all__ = ["fast_matching"]

_CHUNK_SIZE = 1024  # anchors
_LARGE_MATRIX = 2**20  # pairs
_MANY_BOXES = 2**18  # a dry run then does not compute results with one number for each


@contextmanager
def fast_matching(model: nn.Module, run: DryRun) -> Iterator[None]:
    """While open, record large matrices of box pairs without computing; label as with them.

    Hungarian matching takes any match. Predictions are invented, so none is better than another.
    Their costs can be ties, which take long, or not be numbers. Targets of the boxes of anchors are
    not computed: nothing but a loss depends on them.
    """

    def without_values(pairwise_iou: Callable[..., Any]) -> Callable[..., Any]:
        def fake_pairwise_iou(boxes1: Boxes, boxes2: Boxes) -> torch.Tensor:
            tensors = [boxes1.tensor, boxes2.tensor]
            if len(boxes1) * len(boxes2) < _LARGE_MATRIX or is_fake(tensors):
                return pairwise_iou(boxes1, boxes2)
            make_fake(tensors)
            with replaced_functions([Boxes], {"area": _fake_results}):
                matrix = pairwise_iou(boxes1, boxes2)
            make_real(tensors)
            matrix.compared = boxes1, boxes2
            return matrix

        return fake_pairwise_iou

    def without_targets(get_deltas: Callable[..., Any]) -> Callable[..., Any]:
        def get_fake_deltas(self: Any, anchors: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
            if len(boxes) < _MANY_BOXES or is_fake(boxes):
                return get_deltas(self, anchors, boxes)
            make_fake(boxes)
            deltas = get_deltas(self, anchors, boxes)
            make_real(boxes)
            return deltas

        return get_fake_deltas

    def use_labels(
        found: tuple[torch.Tensor, torch.Tensor], matcher: Matcher, boxes: Boxes, anchors: Boxes
    ) -> None:
        """Replace the matches and labels of values that were not computed."""
        for result, real in zip(found, _labels(matcher, upright(boxes), upright(anchors))):
            result.copy_(real)
        make_real(found)

    def with_labels(call: Callable[..., Any]) -> Callable[..., Any]:
        def match(self: Matcher, matrix: Any) -> tuple[torch.Tensor, torch.Tensor]:
            found = call(self, matrix)
            if hasattr(matrix, "compared"):
                with run.paused():
                    use_labels(found, self, *matrix.compared)
                del matrix.compared
            return found

        return match

    files = source_files(model.modules())
    names = [n for n in ("pairwise_iou", "pairwise_iou_rotated") if knows_function(files, n)]
    solver = "linear_sum_assignment"
    # A matcher need not be a module of the model.
    matchers = [f for f in files if solver in vars(f)]
    matchers += [module for module, _ in modules_with(solver)]
    # Models call these functions by name. They have no arguments that would choose others.
    groups: list[tuple[list[Any], dict[str, Any]]] = [
        ([Matcher], {"__call__": with_labels}),
        (files, dict.fromkeys(names, without_values)),
        ([Box2BoxTransform], {"get_deltas": without_targets}),
        ([masks], {"rasterize_polygons_within_box": _once_per_box}),
        (matchers, {solver: _assign_at_once} if matchers else {}),
    ]
    with replaced_together(groups):
        yield


def _fake_results(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A replacement of a function that makes results of fake tensors, even small ones, fake."""
    return lambda *args: make_fake(call(*args))


def _assign_at_once(_: Callable[..., Any]) -> Callable[..., Any]:
    """A replacement of ``scipy.optimize.linear_sum_assignment``."""

    def linear_sum_assignment(cost_matrix: Any, maximize: bool = False) -> tuple[Any, Any]:
        num = min(cost_matrix.shape)
        return np.arange(num), np.arange(num)

    return linear_sum_assignment


def _once_per_box(rasterize: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A replacement of Detectron2's ``rasterize_polygons_within_box``, for it takes a while."""
    known: dict[Any, torch.Tensor] = {}

    def rasterize_once(polygons: Any, box: NDArray[Any], mask_size: int) -> torch.Tensor:
        key = mask_size, box.tobytes(), *(polygon.tobytes() for polygon in polygons)
        if key not in known:
            known[key] = rasterize(polygons, box, mask_size)
        return known[key]

    return rasterize_once


def _labels(matcher: Matcher, boxes: Boxes, anchors: Boxes) -> tuple[torch.Tensor, torch.Tensor]:
    ours, theirs = (np.ascontiguousarray(b.tensor.numpy()) for b in (boxes, anchors))
    digest = sha1(theirs.tobytes()).hexdigest()
    if digest not in _overlaps:
        _overlaps.clear()  # those of one image size take some 20 MB
        _computed.clear()
        _overlaps[digest] = _Overlaps(theirs)
    key = digest, repr(vars(matcher)), ours.tobytes()
    if key not in _computed:
        _computed[key] = _find_labels(matcher, ours, _overlaps[digest])
    return _computed[key]


class _Overlaps:
    """IoUs of boxes with the anchors near them, as by ``pairwise_iou``, computed once for each box.

    A box is compared with the anchors of the chunks that it overlaps; with all others, its IoU is
    0. NumPy is not slowed down by a dry run's mode.
    """

    def __init__(self, anchors: NDArray[Any]) -> None:
        self._sides = x1, y1, x2, y2 = np.ascontiguousarray(anchors.T)
        self.areas = (x2 - x1) * (y2 - y1)
        starts = np.arange(0, len(anchors), _CHUNK_SIZE)
        self._low = [np.minimum.reduceat(side, starts) for side in self._sides]
        self._high = [np.maximum.reduceat(side, starts) for side in self._sides]
        self._known: dict[bytes, Any] = {}

    def compare(self, box: NDArray[Any]) -> tuple[list[tuple[slice, NDArray[Any]]], Any]:
        """The IoUs in slices of the anchors, and the indices of the anchors with the largest."""
        if box.tobytes() not in self._known:
            ious = [(chunk, self._iou(box, chunk)) for chunk in _runs(self._is_near(box))]
            best = max((iou.max() for _, iou in ious), default=0)
            found = [chunk.start + np.flatnonzero(iou == best) for chunk, iou in ious]
            self._known[box.tobytes()] = ious, np.concatenate(found) if best > 0 else slice(None)
        return self._known[box.tobytes()]

    def _is_near(self, box: NDArray[Any]) -> NDArray[Any]:
        (x1, y1), (x2, y2) = self._low[:2], self._high[2:]
        return (x1 < box[2]) & (y1 < box[3]) & (x2 > box[0]) & (y2 > box[1])

    def _iou(self, box: NDArray[Any], chunk: slice) -> NDArray[Any]:
        x1, y1, x2, y2 = (side[chunk] for side in self._sides)
        width = np.minimum(x2, box[2]) - np.maximum(x1, box[0])
        height = np.minimum(y2, box[3]) - np.maximum(y1, box[1])
        common = np.maximum(width, 0) * np.maximum(height, 0)
        area = (box[2] - box[0]) * (box[3] - box[1])
        return np.where(common > 0, common / (area + self.areas[chunk] - common), 0)


def _find_labels(
    matcher: Matcher, boxes: NDArray[Any], overlaps: _Overlaps
) -> tuple[torch.Tensor, torch.Tensor]:
    """The match and the label of each anchor, as by ``pairwise_iou`` and ``matcher``."""
    values = np.zeros_like(overlaps.areas)
    matches = np.zeros(len(values), np.int64)
    best_of_boxes = []
    for number, box in enumerate(boxes):
        ious, best = overlaps.compare(box)
        for chunk, iou in ious:
            np.copyto(matches[chunk], number, where=iou > values[chunk])
            np.maximum(values[chunk], iou, out=values[chunk])
        best_of_boxes.append(best)
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


_overlaps: dict[str, _Overlaps] = {}  # by a digest of the anchors
_computed: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}  # some MB per image size
