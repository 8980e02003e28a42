# Copyright (c) the d2_memfit developers.
"""Sums that predict the bytes of micro-batches, fitted to runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...iteration import largest_sum

__all__ = ["Run", "fitted", "fitted_to_two", "least_squares"]

_WITHOUT_OBJECTS = 3  # number of features without objects
_ROUNDS = 20

Sum = tuple[float, ...]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Run:
    """A measured micro-batch.

    Args:
        features: features of its images, see :data:`~d2_memfit.iteration.cost_model.FEATURES`.
        needs: bytes that the process needs.
        seconds: seconds of its forward and backward.
    """

    features: tuple[float, ...]
    needs: float
    seconds: float

    def predicted(self, sums: Sequence[Sum]) -> float:
        """The bytes that sums predict for it."""
        return float(largest_sum(sums, self.features))


def fitted(runs: Sequence[Run], has_objects: bool = False) -> Sum:
    """Fit a sum with the smallest relative errors, without negative terms.

    More images, pixels or objects never need less.

    Args:
        has_objects: whether it has terms for objects.
    """
    needs = np.array([run.needs for run in runs])
    rows = np.array([run.features for run in runs]) / needs[:, None]
    if not has_objects:
        rows[:, _WITHOUT_OBJECTS:] = 0
    return least_squares(rows, np.ones(len(runs)))


def fitted_to_two(runs: Sequence[Run], first: Sum, threshold: float) -> list[Sum]:
    """Fit two sums whose maximum predicts the bytes of the runs.

    Only the second has terms for objects. A run belongs to the sum that predicts more for it. Each
    sum is fitted to its runs, in turn, until nothing changes (Magnani and Boyd, "Convex
    piecewise-linear fitting", 2009).

    Args:
        first: a sum for the runs that need little.
        threshold: ratio of need to ``first``'s prediction from which a run belongs to the second
            sum.
    """
    is_second = [run.needs > threshold * run.predicted([first]) for run in runs]
    best: tuple[float, list[Sum]] = (float("inf"), [first])
    for _ in range(_ROUNDS):
        groups = [[r for r, s in zip(runs, is_second) if s == which] for which in (False, True)]
        sums = [fitted(group, bool(i)) for i, group in enumerate(groups) if group]
        best = min(best, (max(abs(r.predicted(sums) / r.needs - 1) for r in runs), sums))
        before = is_second
        is_second = [r.predicted(sums[-1:]) > r.predicted(sums[:1]) for r in runs]
        if is_second == before or len(sums) == 1:
            break
    return best[1]


def least_squares(rows: Array, values: Array) -> Sum:
    """Nonnegative coefficients, one per column, with the smallest squared error."""
    from scipy.optimize import nnls  # it takes 0.3 s

    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    found, _ = nnls(rows / scale, values)
    return tuple(float(number) for number in found / scale)
