# Copyright (c) the d2_memfit developers.
"""The memory and time that recomputing or offloading each block would change."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..device import DeviceModel
from ..dry_run import (
    Allocate,
    Allocation,
    BlockCall,
    Free,
    Operator,
    Timeline,
    Work,
    Workspace,
)
from .knapsack import Blocks

__all__ = ["blocks_of"]

_OFFLOADED_BYTES = 2**20  # smaller tensors stay on the device


def blocks_of(timeline: Timeline, device: DeviceModel) -> Blocks:
    """Compute the inputs of the knapsack from a timeline.

    Args:
        timeline: of an iteration in which no block is recomputed or offloaded.
    """
    lives = _Lives(timeline)
    kept = {id(call): _Kept(call, lives) for call in timeline.calls}
    by_name: dict[str, list[_Kept]] = defaultdict(list)
    for call in timeline.calls:
        if kept[id(call)].allocations:
            by_name[call.name].append(kept[id(call)])
    names = [name for name, calls in by_name.items() if sum(c.num_bytes for c in calls)]
    calls_of = [by_name[name] for name in names]
    times = _times(lives, [c for calls in calls_of for c in calls])
    shape = len(times), len(names)
    recomputed, offloaded = np.zeros(shape), np.zeros(shape)
    for i, calls in enumerate(calls_of):
        for of_call in calls:
            recomputed[:, i] += of_call.recomputed_bytes(times)
            offloaded[:, i] += of_call.offloaded_bytes(times)
    forward_s, backward_s = (device.seconds(timeline.work[p]) for p in ("forward", "backward"))
    recompute_s = np.array([sum(device.seconds(c.call.work) for c in calls) for calls in calls_of])
    copy_s = np.array([sum(c.copied_bytes for c in calls) for calls in calls_of])
    copy_s = copy_s / device.copied_bytes_per_s
    fetch_s = np.array([sum(device.seconds(c.fetching) for c in calls) for calls in calls_of])
    # What the computation of the block does not hide, as in DeviceModel.seconds_with_copies.
    for hidden_s in (recompute_s, recompute_s * backward_s / forward_s):
        fetch_s = fetch_s + np.maximum(copy_s - hidden_s, 0)
    return Blocks(
        names,
        lives.bytes_after[times],
        recomputed,
        offloaded,
        recompute_s,
        copy_s,
        fetch_s,
        forward_s,
        backward_s,
        [
            (i, j)
            for i, j in combinations(range(len(names)), 2)
            if f"{names[j]}.".startswith(f"{names[i]}.")
            or f"{names[i]}.".startswith(f"{names[j]}.")
        ],
    )


class _Lives:
    """Begin and end of each allocation, as positions in the timeline's events."""

    def __init__(self, timeline: Timeline) -> None:
        self.events = events = timeline.events
        self.begin = {e.allocation: i for i, e in enumerate(events) if isinstance(e, Allocate)}
        self.end = {e.allocation: i for i, e in enumerate(events) if isinstance(e, Free)}
        self.bytes_after = np.cumsum(
            [0 if isinstance(e, Workspace) else e.num_bytes for e in events]
        )
        phases = [event.phase for event in events]
        self.backward = phases.index("backward") if "backward" in phases else len(events)

    def end_of(self, allocation: Allocation) -> int:
        return self.end.get(allocation, len(self.bytes_after))


@dataclass
class _Kept:
    """The allocations that a call keeps for the backward, without its outputs.

    Attributes:
        first, last: positions of the first and last event in the backward that frees one of them.
    """

    call: BlockCall
    lives: _Lives

    def __post_init__(self) -> None:
        call, lives = self.call, self.lives
        inside = [e for e in lives.events[call.begin : call.end] if isinstance(e, Allocate)]
        self.allocations = [
            e.allocation
            for e in inside
            if lives.end_of(e.allocation) >= lives.backward and e.allocation not in call.outputs
        ]
        ends = [lives.end_of(a) for a in self.allocations if a in lives.end]
        self.first, self.last = (min(ends), max(ends)) if ends else (0, 0)
        self.num_bytes = sum(a.num_bytes for a in self.allocations)
        # An input that is freed earlier would be kept to recompute the block.
        self.inputs = [a for a in call.inputs if lives.end_of(a) < self.last]
        self.copied = [a for a in self.allocations if a.num_bytes >= _OFFLOADED_BYTES]
        inputs = [a for a in call.inputs if lives.end_of(a) >= self.first]
        copied = [*self.copied, *(a for a in inputs if a.num_bytes >= _OFFLOADED_BYTES)]
        self.copied_bytes = sum(a.num_bytes for a in copied)
        self.fetching = Work(Counter(Operator(num_bytes=2 * a.num_bytes) for a in copied))

    def recomputed_bytes(self, times: NDArray[Any]) -> NDArray[Any]:
        """Change of the bytes in use at some times if the block is recomputed.

        When its backward begins, this is the peak of the forward that runs again.
        """
        change = -self._alive(self.allocations, times) * self._is_away(times)
        for a in self.inputs:
            is_kept = (times > self.lives.end_of(a)) & (times < self.first)
            change = change + a.num_bytes * is_kept
        before = self.lives.bytes_after[self.call.begin - 1] if self.call.begin else 0
        running = self.lives.bytes_after[self.call.begin : self.call.end]
        peak = running.max() - before if len(running) else 0
        change[times == self.first - 1] += max(peak - self.num_bytes, 0)
        return change

    def offloaded_bytes(self, times: NDArray[Any]) -> NDArray[Any]:
        return -self._alive(self.copied, times) * self._is_away(times)

    def _is_away(self, times: NDArray[Any]) -> NDArray[Any]:
        return (times >= self.call.end) & (times < self.first - 1)

    def _alive(self, allocations: list[Allocation], times: NDArray[Any]) -> NDArray[Any]:
        alive = np.zeros(len(times))
        for a in allocations:
            is_alive = (times >= self.lives.begin[a]) & (times < self.lives.end_of(a))
            alive += a.num_bytes * is_alive
        return alive


def _times(lives: _Lives, calls: list[_Kept]) -> NDArray[Any]:
    """Times of the peaks between begins and ends of blocks, and of the begins of backwards."""
    limits = {0, len(lives.bytes_after)}
    for c in calls:
        limits.update((c.call.begin, c.call.end, c.first - 1, c.first, c.last))
    edges = sorted(limits)
    peaks = {b + int(lives.bytes_after[b:e].argmax()) for b, e in zip(edges, edges[1:]) if e > b}
    return np.array(sorted(peaks | {c.first - 1 for c in calls}))
