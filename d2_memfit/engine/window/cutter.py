# Copyright (c) the d2_memfit developers.
"""The limit of micro-batches, learned from what did not fit."""

import math
from typing import Any, Optional

from .window import MicroBatch, Window

__all__ = ["Cutter"]

# Iterations without an out-of-memory error after which a halved limit is doubled again.
GROW_AFTER = 1000

_LEARNED = ("_full", "_clean_iterations", "_failed_growths", "_has_just_grown")


class Cutter:
    """Cuts windows into micro-batches within a limit, and learns the limit from what does not fit.

    The limit is a number of images. It is halved when memory runs out, and doubled after a while
    without errors. If a limit fails again after it has grown, the wait before the next growth
    doubles, from the second failure in a row on.

    Args:
        configured: images per micro-batch; None for the loader's batch.

    Attributes:
        limit: the current limit; infinity means no limit.
        is_configured: whether micro-batches have a limit before anything fails.
    """

    def __init__(self, configured: Optional[int]) -> None:
        self.is_configured = configured is not None
        self.limit: float = configured or math.inf
        self._configured = self.limit
        self._full: float = configured or 0  # the largest micro-batch that is asked for
        self._clean_iterations = 0
        self._failed_growths = 0  # in a row
        self._has_just_grown = False

    @property
    def images(self) -> Optional[int]:
        """Images of the next micro-batch, as for :meth:`Window.take`."""
        return None if self.limit == math.inf else int(self.limit)

    def described(self) -> str:
        """The limit, for the log."""
        return str(self.images or "the loader's batch")

    def take(self, window: Window) -> Optional[MicroBatch]:
        """Take a window's next micro-batch; None at its end.

        A learned limit does not put images of several batches together.
        """
        return window.take(self.images, across_batches=self.is_configured)

    def lower(self, largest: MicroBatch) -> str:
        """Halve the limit.

        Args:
            largest: a micro-batch that can be split and must not be taken whole again.

        Returns:
            str: what was done, for the log.
        """
        failed = largest.num_images
        self._full = max(self._full, failed)
        self._failed_growths += self._has_just_grown
        self._has_just_grown = False
        self._clean_iterations = 0
        self.limit = failed // 2
        return f"the micro-batch is halved to {self.described()}"

    def end_iteration(self, clean: bool) -> bool:
        """Count an iteration, which had enough memory (``clean``) or not.

        Returns:
            bool: whether the limit has grown.
        """
        self._clean_iterations = self._clean_iterations + 1 if clean else 0
        if self._clean_iterations < GROW_AFTER * 2 ** max(0, self._failed_growths - 1):
            return False
        if self._has_just_grown:  # and has held since
            self._failed_growths = 0
            self._has_just_grown = False
        if self.limit == self._configured:
            return False
        self._clean_iterations = 0
        self._has_just_grown = True
        self.limit *= 2
        if self.limit >= self._full:
            self.limit = self._configured
        return True

    def forget(self) -> None:
        """Return to what is configured."""
        self.limit = self._configured

    def state_dict(self) -> dict[str, Any]:
        # A configured limit was not learned; the config may differ when this is loaded.
        learned = None if self.limit == self._configured else self.limit
        return {"images": learned, **{k: getattr(self, k) for k in _LEARNED}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what was learned, up to what is configured now."""
        vars(self).update({k: state[k] for k in _LEARNED if k in state})
        self.limit = min(state["images"] or math.inf, self._configured)
        if self.is_configured:
            self._full = self._configured
