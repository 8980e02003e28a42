# Copyright (c) the d2_memfit developers.
"""Matching in dry runs: large matrices are recorded without values, and any match is taken."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from detectron2.modeling.matcher import Matcher
from detectron2.structures import Boxes
from torch import nn

from ..common.patching import Group, modules_with, replaced_functions, source_files
from ..techniques import masks
from .meta import is_fake, make_fake, make_real

__all__ = ["fast_matching"]

_LARGE_MATRIX = 2**20  # pairs
_COMPUTED = 8  # chunks of a matrix
_ON_OBJECTS = 256  # anchors: as many as RPN samples
# Results of fake tensors are fake, even small ones.
_FAKE_RESULTS = {"area": lambda call: lambda *args: make_fake(call(*args))}


@contextmanager
def fast_matching(model: nn.Module) -> Iterator[None]:
    """While open, record large matrices of box pairs without computing, and label any anchors.

    Of a matrix in chunks, the first few are computed: the others need the same memory.
    Hungarian matching takes any match. Predictions are invented, so none is better than another.
    Their costs can be ties, which take long, or not be numbers.
    """
    chunks = -math.inf  # of the large matrix that is read

    def without_values(pairwise_iou: Callable[..., Any]) -> Callable[..., Any]:
        def fake_pairwise_iou(boxes1: Boxes, boxes2: Boxes) -> torch.Tensor:
            nonlocal chunks
            chunks += 1
            if chunks > _COMPUTED:
                return make_fake(torch.empty(len(boxes1), len(boxes2)))
            tensors = [boxes1.tensor, boxes2.tensor]
            if len(boxes1) * len(boxes2) < _LARGE_MATRIX or is_fake(tensors):
                return pairwise_iou(boxes1, boxes2)
            make_fake(tensors)
            with replaced_functions(([Boxes], _FAKE_RESULTS)):
                matrix = pairwise_iou(boxes1, boxes2)
            make_real(tensors)
            return matrix

        return fake_pairwise_iou

    def with_any_labels(call: Callable[..., Any]) -> Callable[..., Any]:
        def match(self: Matcher, quality: Any) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal chunks
            is_large = quality.numel() >= _LARGE_MATRIX  # a tensor, or one in chunks
            chunks = 0 if is_large else -math.inf
            matches, labels = call(self, quality)
            chunks = -math.inf
            if is_large:
                make_real((matches, labels))
                matches.zero_()
                labels.fill_(min(self.labels, key=abs))[:_ON_OBJECTS] = 1
            return matches, labels

        return match

    solver = "linear_sum_assignment"
    matchers = [file for file, _ in modules_with(solver)]  # which need not be modules of the model
    # Models call these functions by name. They have no arguments that would choose others.
    groups: list[Group] = [
        ([Matcher], {"__call__": with_any_labels}),
        (source_files(model.modules()), {"pairwise_iou": without_values}),
        (matchers, {solver: lambda _: _any_match}),
        ([masks], {"parts_of_points": lambda parts: lambda *args: parts(*args)[:1]}),
    ]
    with replaced_functions(*groups):
        yield


def _any_match(cost_matrix: Any, maximize: bool = False) -> tuple[Any, Any]:
    """In place of ``scipy.optimize.linear_sum_assignment``."""
    num = min(cost_matrix.shape)
    return np.arange(num), np.arange(num)
