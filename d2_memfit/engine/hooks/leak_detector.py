# Copyright (c) the d2_memfit developers.
"""A hook that detects memory leaks and names their owners."""

import gc
import logging
import multiprocessing
import sys
from collections import Counter
from typing import Any, Optional

import torch
from torch import nn

from ... import compat
from ...common.units import MB
from ...compat.pytorch import tree_iter
from ...memory import (
    TensorCensus,
    bytes_by_kind,
    holders,
    limit_onednn_cache,
    process_memory,
    rises_steadily,
    used_bytes,
)
from .memory_hook import MemoryHook

__all__ = ["LeakDetector"]

logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")
# What counts as a leak. A leak of 1 MiB in 100 iterations adds 10 KiB in each. Small objects leak
# as at least 20 objects per iteration: the largest that Python's own allocator serves has 512 B.
_BYTES_PER_ITERATION = 8 * 2**10
_OBJECTS_PER_ITERATION = 18


class LeakDetector(MemoryHook):
    """Warns once for each kind of memory whose use after iterations grows steadily.

    It measures GPU tensors, host memory, small Python objects (which have their own allocator) and
    the loader's workers. Bounded growth is not reported: the hook limits oneDNN's caches, which
    fill for hundreds of iterations, and collects garbage in cycles before a warning.

    The warning gives the growth per 1000 iterations, the shapes of the new tensors, and the modules
    or hooks that hold them. Memory that Python cannot see, such as the graph of a kept loss, is
    part of the growth, but not listed among the tensors.

    Make it before the number of threads is set and the first convolution runs, and register it on
    each rank to watch.

    Args:
        window: iterations over which memory must grow.
        skip: iterations at the beginning, which fill caches.
    """

    def __init__(self, window: int = 400, skip: int = 50) -> None:
        limit_onednn_cache()
        self._window = window
        self._skip = skip
        self._used: dict[str, list[float]] = {}  # by kind, in this window
        self._largest = 0  # numbers in the largest tensor of a batch
        self._said: set[str] = set()
        self._census: Optional[TensorCensus] = None

    def after_forward(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Restart the window if images are larger than before, as they may need more memory."""
        tensors = [leaf for leaf in tree_iter(args) if isinstance(leaf, torch.Tensor)]
        largest = max((tensor.numel() for tensor in tensors), default=0)
        if largest > self._largest:
            self._largest = largest
            self._used.clear()

    def after_step(self) -> None:
        done = self.trainer.iter + 1 - self.trainer.start_iter - self._skip
        if done <= 0:
            return
        for kind, used in self._measure().items():
            self._used.setdefault(kind, []).append(used)
        if len(self._used["host"]) == self._window // 8:  # larger images may begin many windows
            self._census = TensorCensus()
        elif len(self._used["host"]) == self._window:
            self._warn(self._growth())
            self._used.clear()

    def _measure(self) -> dict[str, float]:
        used: dict[str, float] = {"host": used_bytes(_HOST)}
        if self._device.type != "cpu":
            used["device"] = used_bytes(self._device)
        # Each entry of a history is a tuple and a number, and stays as long as the run.
        entries = sum(map(len, compat.scalar_histories(self.trainer.storage)))
        used["objects"] = sys.getallocatedblocks() - 2 * entries
        workers = multiprocessing.active_children()
        if workers:
            used["workers"] = sum(process_memory(w.pid).anonymous_bytes for w in workers)
        return used

    def _growth(self) -> dict[str, float]:
        """Growth per iteration by kind, without the kinds that do not grow."""
        growing = {
            kind: used[0]
            for kind, used in self._used.items()
            if kind not in self._said
            and len(used) == self._window
            and rises_steadily(used, _at_least(kind) * self._window)
        }
        if not growing:
            return {}
        gc.collect()
        now = self._measure()
        growth = {kind: (now[kind] - first) / self._window for kind, first in growing.items()}
        return {kind: each for kind, each in growth.items() if each >= _at_least(kind)}

    def _warn(self, growing: dict[str, float]) -> None:
        self._said.update(growing)
        if "workers" in growing:
            logger.warning(
                "The memory of the data loader's workers grows by %.1f MB per 1000 iterations, "
                "over the last %d iterations. Look at what the dataset and its mapper keep",
                growing.pop("workers") * 1000 / MB,
                self._window,
            )
        objects = growing.pop("objects", 0)
        if growing:
            assert self._census is not None
            new = self._census.newcomers()
            logger.warning(
                "Memory in use grows by %.1f MB per 1000 iterations, over the last %d "
                "iterations%s. New tensors: %s. They are held by: %s",
                sum(growing.values()) * 1000 / MB,
                self._window,
                f"; Python objects by {objects:.0f} per iteration" if objects else "",
                _most(bytes_by_kind(new)),
                _most(holders(new, self._owners())),
            )
        elif objects:
            logger.warning(
                "Python objects grow by %.0f per iteration, over the last %d iterations. Look at "
                "what the hooks and the loader keep",
                objects,
                self._window,
            )

    def _owners(self) -> list[tuple[str, Any]]:
        hooks = [hook for hook in compat.hooks_of(self.trainer) if hook is not self]
        owners = [(type(hook).__name__, hook) for hook in hooks]
        model = self._model
        inner = self._inner
        owners += [(name or type(model).__name__, module) for name, module in model.named_modules()]
        owners += [("the data loader", inner.data_loader), ("the optimizer", inner.optimizer)]
        owners += [("the event storage", self.trainer.storage)]
        return [*owners, ("the trainer", inner), ("the trainer", self.trainer)]


def _at_least(kind: str) -> int:
    return _OBJECTS_PER_ITERATION if kind == "objects" else _BYTES_PER_ITERATION


def _most(counts: Counter[str], num: int = 3) -> str:
    items = [f"{name} ({size / MB:.1f} MB)" for name, size in counts.most_common(num)]
    return ", ".join(items) or "none that Python can see"
