# Copyright (c) the d2_memfit developers.
"""A hook that detects memory that grows steadily, and names the tensors that do."""

import gc
import logging
import sys
from collections import Counter
from itertools import combinations
from multiprocessing import active_children
from statistics import median
from typing import Any

import torch

from ... import compat, memory
from ...common.units import MB
from .memory_hook import MemoryHook

__all__ = ["LeakDetector", "rises_steadily"]

logger = logging.getLogger(__name__)

_MEMORY = "Memory in use on {} grows by {{:.1f}} MB"
_OBJECTS = "The number of Python objects grows by {:.0f}"
# What counts as a leak, per iteration. A leak of 1 MiB in 100 iterations adds 10 KiB in each. Small
# objects leak as at least 20 per iteration: the largest that Python's own allocator serves has
# 512 B.
_LEAST_MB = 2**-7
_FEWEST_OBJECTS = 18
_NUM_BLOCKS = 20  # of a window


class LeakDetector(MemoryHook):
    """Warns once for each kind of memory whose use after iterations grows steadily.

    It measures GPU tensors, host memory, small Python objects (which have their own allocator) and
    the loader's workers. Bounded growth is not reported: the hook limits oneDNN's caches, which
    fill for hundreds of iterations, and collects garbage in cycles before a warning.

    The warning gives the growth, the shapes of the tensors that have become more, and the modules
    or hooks that hold them. Memory that Python cannot see, such as the graph of a kept loss, is
    part of the growth, but not listed among the tensors.

    Make it before the number of threads is set and the first convolution runs, and register it on
    each rank to watch.

    Args:
        window: iterations over which memory must grow.
        skip: iterations at the beginning, which fill caches.
    """

    def __init__(self, window: int = 400, skip: int = 50) -> None:
        memory.limit_onednn_cache()
        self._window, self._skip = window, skip
        self._used: dict[str, list[float]] = {}  # by kind, after each iteration of this window
        self._largest = 0  # numbers in the largest tensor of a batch
        self._said: set[str] = set()
        self._tensors: Counter[str] = Counter()  # bytes by kind, when the window began

    def after_forward(self, model: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Restart the window if images are larger than before, as they may need more memory."""
        largest = max((tensor.numel() for tensor in memory.tensors_in(args)), default=0)
        if largest > self._largest:
            self._largest = largest
            self._used.clear()

    def after_step(self) -> None:
        if self.trainer.iter - self.trainer.start_iter < self._skip:
            return
        for kind, used in self._measure().items():
            self._used.setdefault(kind, []).append(used)
        num = len(self._used[_OBJECTS])
        if num == self._window // 8:  # larger images may begin many windows
            self._tensors = memory.bytes_by_kind(memory.dense_tensors())
        elif num == self._window:
            self._warn()
            self._used.clear()

    def _measure(self) -> dict[str, float]:
        """Memory in MB, and the number of objects, by a text for their growth."""
        # Each entry of a history is a tuple and a number, and stays as long as the run.
        entries = sum(map(len, compat.scalar_histories(self.trainer.storage)))
        of_workers = sum(memory.process_memory(w.pid).anonymous_bytes for w in active_children())
        devices = {torch.device("cpu"), self._device}
        used = {_MEMORY.format(device): memory.used_bytes(device) / MB for device in devices}
        used["The memory of the data loader's workers grows by {:.1f} MB"] = of_workers / MB
        used[_OBJECTS] = sys.getallocatedblocks() - 2 * entries
        return used

    def _warn(self) -> None:
        growing = []
        for kind, used in self._used.items():
            least = self._window * (_FEWEST_OBJECTS if kind == _OBJECTS else _LEAST_MB)
            if kind in self._said or not rises_steadily(used, least):
                continue
            gc.collect()
            growth = self._measure()[kind] - used[0]
            if growth >= least:
                self._said.add(kind)
                growing.append(f"{kind.format(growth * 1000 / self._window)} per 1000 iterations")
        if growing:
            text = "%s, over the last %d iterations. Growing tensors: %s"
            logger.warning(text, "; ".join(growing), self._window, self._growing_tensors())

    def _growing_tensors(self) -> str:
        tensors = list(memory.dense_tensors())
        more = memory.bytes_by_kind(tensors) - self._tensors
        if not more:
            return "none that Python can see"
        owners = [("the data loader", self._inner.data_loader), ("the trainer", self._inner)]
        owners += [(type(h).__name__, h) for h in compat.hooks_of(self.trainer) if h is not self]
        owners += [(name or "the model", m) for name, m in self._model.named_modules()]
        tensors = [tensor for tensor in tensors if memory.kind_of(tensor) in more]
        return f"{_largest(more)}, held by: {_largest(memory.holders(tensors, owners))}"


def _largest(sizes: Counter[str]) -> str:
    return ", ".join(f"{name} ({size / MB:.1f} MB)" for name, size in sizes.most_common(3))


def rises_steadily(values: list[float], at_least: float) -> bool:
    """Whether a series rises from its beginning to its end.

    Each of 20 blocks is represented by its minimum, which large images do not raise. The slope is
    the median over all pairs of blocks (Theil-Sen), so single outliers do not count. Two things
    rise and are not steady: caches, which stop when they are full, and steps, such as those of
    evaluations, between which nothing rises.

    Args:
        values: one for each step, at least 20.
        at_least: smallest rise over the whole series that counts.
    """
    bounds = [i * len(values) // _NUM_BLOCKS for i in range(_NUM_BLOCKS + 1)]
    blocks = [min(values[a:b]) for a, b in zip(bounds, bounds[1:])]
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(blocks), 2)]
    slope = median(slopes)
    growth = slope * _NUM_BLOCKS
    last_quarter = blocks[-1] - blocks[-1 - _NUM_BLOCKS // 4]
    return (
        growth >= at_least
        and sum(s > 0 for s in slopes) >= 0.9 * len(slopes)
        and last_quarter > growth / 8
        and median(b - a for a, b in zip(blocks, blocks[1:])) > slope / 2
    )
