"""Whether memory leaks, and what holds it."""

import logging
from collections import Counter, deque
from typing import Any, Optional

import torch
from detectron2.engine import HookBase

from .. import compat
from ..memory import TensorCensus, bytes_by_kind, holders, steady_growth, used_bytes

__all__ = ["LeakDetector"]

logger = logging.getLogger(__name__)


class LeakDetector(HookBase):
    """Warns once if the memory in use after iterations grows steadily.

    The warning says how much 1000 iterations add, what kinds of tensors have come, and which of the
    model's modules or the trainer's hooks hold them. What Python cannot see, such as the graph
    behind a loss that is kept, is in the growth and not among the tensors.

    Register it on the ranks that shall look, each for itself.

    Args:
        window: iterations over which memory must grow.
        skip: iterations at the beginning, which fill caches.
        at_least_bytes: growth over the window that counts.
    """

    def __init__(self, window: int = 400, skip: int = 50, at_least_bytes: int = 2**22) -> None:
        self._window = window
        self._skip = skip
        self._at_least_bytes = at_least_bytes
        self._used: deque[int] = deque(maxlen=window)
        self._census: Optional[TensorCensus] = None
        self._has_warned = False

    def after_step(self) -> None:
        if self._has_warned:
            return
        done = self.trainer.iter + 1 - self.trainer.start_iter - self._skip
        if done <= 0:
            return
        device = next(self.trainer.model.parameters()).device
        self._used.append(used_bytes(device))
        if done % self._window == 1:
            self._census = TensorCensus()
        elif self._census is not None and done >= self._window and done % (self._window // 8) == 0:
            growth = steady_growth(list(self._used), self._at_least_bytes)
            if growth:
                self._warn(growth, self._census.newcomers())

    def _warn(self, growth: float, new: list[torch.Tensor]) -> None:
        self._has_warned = True
        owners = [(type(hook).__name__, hook) for hook in self.trainer._hooks]
        model = compat.without_ddp(self.trainer.model)
        owners += [(name or type(model).__name__, module) for name, module in model.named_modules()]
        inner: Any = getattr(self.trainer, "_trainer", self.trainer)
        owners += [("the data loader", inner.data_loader), ("the optimizer", inner.optimizer)]
        owners += [("the event storage", self.trainer.storage), ("the trainer", inner)]
        owners += [("the trainer", self.trainer)] if inner is not self.trainer else []
        logger.warning(
            "Memory in use grows by %.1f MB per 1000 iterations, and has for the last %d. Tensors "
            "that have come: %s. They are held by: %s",
            growth * 1000 / 2**20,
            len(self._used),
            _most(bytes_by_kind(new)),
            _most(holders(new, owners)),
        )


def _most(counts: Counter[str], num: int = 3) -> str:
    items = [f"{name} ({size / 2**20:.1f} MB)" for name, size in counts.most_common(num)]
    return ", ".join(items) or "none that Python can see"
