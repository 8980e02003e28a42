# Copyright (c) the d2_memfit developers.
"""Hungarian matching whose costs are computed for some objects at a time."""

from collections.abc import Sequence
from typing import Any, Callable, Optional, Union

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ..patching import replaced_functions, source_files
from ..random_state import RandomState
from .objects import chunks_of, count_objects, device_of, is_targets, take_objects

__all__ = ["SOLVER", "MatcherCall"]

SOLVER = "linear_sum_assignment"  # of SciPy

_Matrix = NDArray[Any]
_Solve = Callable[..., tuple[_Matrix, _Matrix]]


class MatcherCall:
    """A call of a Hungarian matcher.

    The matcher computes costs, queries x objects, and gives those of each image to
    ``linear_sum_assignment``.

    Args:
        forward: called as ``forward(matcher, *args, **kwargs)``.
        args, kwargs: predictions, and lists with the targets of each image.

    Attributes:
        counts: numbers of objects in each image; None if the arguments do not tell.
        device: device of the predictions.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        matcher: nn.Module,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        self._forward = forward
        self._matcher = matcher
        self._arguments: dict[Union[int, str], Any] = dict(enumerate(args))
        self._arguments.update(kwargs)
        self.device = device_of(self._arguments)
        self._targets = {k: v for k, v in self._arguments.items() if is_targets(v)}
        counts = [count_objects(targets) for targets in self._targets.values()]
        is_known = bool(counts) and all(count == counts[0] for count in counts)
        self.counts: Optional[list[int]] = counts[0] if is_known else None

    def of(self, chosen: Sequence[slice]) -> "MatcherCall":
        """The call with only some objects of each image."""
        targets = {k: take_objects(v, chosen) for k, v in self._targets.items()}
        args, kwargs = _split({**self._arguments, **targets})
        return MatcherCall(self._forward, self._matcher, args, kwargs)

    def run(self, chunk_size: int) -> tuple[Any, list[_Matrix]]:
        """Match with costs computed in chunks.

        Args:
            chunk_size: objects whose costs are computed at a time.

        Returns:
            The matcher's result; and the matched matrices, with the numbers of pairs of each image.
        """
        assert self.counts is not None
        state = RandomState(self.device)
        matrices = _Matrices()
        chunks = list(chunks_of(self.counts, chunk_size))
        for chunk in chunks:
            state.restore()  # all chunks compare masks at the same points
            matrices.begin(is_last=chunk is chunks[-1])
            result = self.of(chunk)._call(matrices)
        return result, [*matrices.whole, np.array([len(queries) for queries, _ in result])]

    def _call(self, matrices: "_Matrices") -> Any:
        args, kwargs = _split(self._arguments)
        files = [file for file in source_files([self._matcher]) if hasattr(file, SOLVER)]
        with replaced_functions(files, {SOLVER: matrices.gathering}):
            return self._forward(self._matcher, *args, **kwargs)


def _split(arguments: dict[Any, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Separate positional from keyword arguments."""
    args = [value for key, value in arguments.items() if isinstance(key, int)]
    return args, {key: value for key, value in arguments.items() if isinstance(key, str)}


class _Matrices:
    """Gathers columns that are computed chunk by chunk, and matches complete matrices.

    Attributes:
        whole: the complete matrices, in the order in which the matcher uses them.
    """

    def __init__(self) -> None:
        self.whole: list[_Matrix] = []
        self._columns: list[list[_Matrix]] = []

    def begin(self, is_last: bool) -> None:
        """Begin a chunk."""
        self._is_last = is_last
        self._position = 0

    def gathering(self, solve: _Solve) -> _Solve:
        def linear_sum_assignment(cost_matrix: Any, *args: Any, **kwargs: Any) -> Any:
            if self._position == len(self._columns):
                self._columns.append([])
            columns = self._columns[self._position]
            columns.append(np.array(cost_matrix))
            self._position += 1
            if not self._is_last:
                num = min(columns[-1].shape)
                return np.arange(num), np.arange(num)
            self.whole.append(np.concatenate(columns, axis=1))
            columns.clear()
            return solve(self.whole[-1], *args, **kwargs)

        return linear_sum_assignment
