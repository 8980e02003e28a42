# Copyright (c) the d2_memfit developers.
"""The choice of blocks to recompute or to offload, as a knapsack."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
from numpy.typing import NDArray

from ...common.units import MB

__all__ = ["Blocks", "Packing", "pack"]

_GAP = 1e-3  # relative gap in time at which the solver stops
_SECONDS = 5.0  # for the solver, which then returns its best solution


@dataclass(frozen=True)
class Blocks:
    """The blocks of a model, each of which is saved, recomputed or offloaded.

    Attributes:
        names: names of the modules, N.
        bytes_at: bytes in use at T times of an iteration if all blocks are saved, [T].
        recomputed_bytes: change of ``bytes_at`` if a block is recomputed, [T, N].
        offloaded_bytes: change of ``bytes_at`` if a block is offloaded, [T, N].
        recompute_s: seconds of a block's forward, [N].
        copy_s: seconds to copy a block's activations, [N]. Copies overlap with the computation.
        fetch_s: seconds that offloading adds to the computation, [N].
        forward_s, backward_s: seconds of all computation.
        overlaps: pairs of positions of blocks within each other.
    """

    names: Sequence[str]
    bytes_at: NDArray[Any]
    recomputed_bytes: NDArray[Any]
    offloaded_bytes: NDArray[Any]
    recompute_s: NDArray[Any]
    copy_s: NDArray[Any]
    fetch_s: NDArray[Any]
    forward_s: float
    backward_s: float
    overlaps: Sequence[tuple[int, int]]

    def least_bytes(self, recomputes: bool = True, offloads: bool = True) -> float:
        """A bound of the peak with any packing."""
        best = np.minimum(self.recomputed_bytes * recomputes, self.offloaded_bytes * offloads)
        return float((self.bytes_at + np.minimum(best, 0).sum(axis=1)).max())


@dataclass(frozen=True)
class Packing:
    """A choice of blocks, with its memory and time.

    Attributes:
        recomputed, offloaded: names of blocks. The others are saved.
        peak_bytes: peak memory with this choice.
        seconds: seconds of a forward and its backward.
    """

    recomputed: tuple[str, ...]
    offloaded: tuple[str, ...]
    peak_bytes: float
    seconds: float


def pack(
    blocks: Blocks, limit_bytes: float, recomputes: bool = True, offloads: bool = True
) -> Optional[Packing]:
    """Find the fastest packing within a limit, by mixed-integer programming.

    Among equally fast packings, it has the fewest blocks. None if no packing fits.

    Args:
        recomputes, offloads: whether blocks may be recomputed or offloaded.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # it takes 0.3 s

    n, ones = len(blocks.names), np.ones(len(blocks.names))
    # Variables: whether each is recomputed, whether it is offloaded, forward and backward seconds.
    none = np.zeros(n)
    memory = np.hstack([blocks.recomputed_bytes, blocks.offloaded_bytes])
    memory = np.hstack([memory, np.zeros((len(memory), 2))]) / MB
    times = np.array(
        [
            [*none, *-blocks.copy_s, 1, 0],  # the forward is not shorter than the copies
            [*none, *-blocks.copy_s, 0, 1],
            [*-blocks.recompute_s, *-blocks.fetch_s, 0, 1],
        ]
    )
    groups = [(i,) for i in range(n)] + [tuple(pair) for pair in blocks.overlaps]
    exclusive = np.zeros((len(groups), 2 * n + 2))
    for row, group in zip(exclusive, groups):
        for i in group:
            row[[i, n + i]] = 1
    upper = np.concatenate([ones * recomputes, ones * offloads, [np.inf, np.inf]])
    lower = np.concatenate([none, none, [blocks.forward_s, blocks.backward_s]])
    seconds = blocks.forward_s + blocks.backward_s
    few = np.full(2 * n, _GAP * seconds / (100 * n)) if n else none
    result = milp(
        np.concatenate([few, [1, 1]]) / seconds,
        integrality=[1] * 2 * n + [0, 0],
        bounds=Bounds(lower, upper),
        constraints=[
            LinearConstraint(memory, ub=(limit_bytes - blocks.bytes_at) / MB),
            LinearConstraint(times, lb=[0, 0, blocks.backward_s]),
            LinearConstraint(exclusive, ub=1),
        ],
        options={"mip_rel_gap": _GAP, "time_limit": _SECONDS},
    )
    if result.x is None:
        return None
    chosen = np.round(result.x[:-2])
    recomputed, offloaded = chosen[:n] > 0, chosen[n:] > 0
    return Packing(
        tuple(name for name, is_chosen in zip(blocks.names, recomputed) if is_chosen),
        tuple(name for name, is_chosen in zip(blocks.names, offloaded) if is_chosen),
        float((blocks.bytes_at + memory[:, :-2] @ chosen * MB).max()),
        float(result.x[-2:].sum()),
    )
