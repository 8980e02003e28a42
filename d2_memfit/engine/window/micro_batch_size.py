# Copyright (c) the d2_memfit developers.
"""The number of images per micro-batch, learned from what did not fit."""

import math
from typing import Any, Optional

from .window import MicroBatch, Window

__all__ = ["MicroBatchSize"]


class MicroBatchSize:
    """A size that is halved when memory runs out, and doubled after a while without errors.

    A size that fails again after growing is tried later the next time. From the second failure in a
    row on, the wait doubles each time.

    Args:
        configured: images per micro-batch; None is the loader's batch.
        grow_after: iterations without an out-of-memory error before the size is doubled.

    Attributes:
        images: the current size, as for :meth:`Window.take`; None is the loader's batch.
    """

    def __init__(self, configured: Optional[int], grow_after: int) -> None:
        self._configured = configured
        self._grow_after = grow_after
        self._full = configured or 0  # images in the largest micro-batch that is asked for
        self._clean_iterations = 0
        self._failed_growths = 0  # in a row
        self._has_just_grown = False
        self.images = configured

    @property
    def limit(self) -> float:
        """The limit of micro-batches, which orders sizes; infinity is none."""
        return math.inf if self.images is None else self.images

    def described(self) -> str:
        """The limit with its unit, for the log."""
        return "the loader's batch" if self.images is None else f"{self.images} images"

    def lower(self, largest: Optional[MicroBatch], window: Optional[Window] = None) -> str:
        """Halve the limit.

        Args:
            largest: can be split, and is not taken whole again; None halves a limit that has grown.
            window: its rest is cut again, if it was cut.

        Returns:
            str: what was done, for the log.
        """
        images = largest.num_images if largest is not None else self.images or self._full
        return f"the micro-batch is halved to {self.halve(images)}"

    def halve(self, num_images: int) -> int:
        """Halve the size after a micro-batch of this many images, at least two, did not fit.

        Returns:
            int: the new size.
        """
        self._full = max(self._full, num_images)
        if self._has_just_grown:
            self._failed_growths += 1
        self._has_just_grown = False
        self._clean_iterations = 0
        self.images = num_images // 2
        return self.images

    def end_iteration(self, clean: bool) -> bool:
        """Count an iteration, with (``clean``) or without enough memory.

        Returns:
            bool: whether the size has grown.
        """
        self._clean_iterations = self._clean_iterations + 1 if clean else 0
        if self._clean_iterations < self._wait:
            return False
        if self._has_just_grown:  # and has held since
            self._failed_growths = 0
            self._has_just_grown = False
        if self.images is None or self.images == self._configured:
            return False
        self._clean_iterations = 0
        self._has_just_grown = True
        self.images *= 2
        if self.images >= self._full:
            self.images = self._configured
        return True

    @property
    def _wait(self) -> int:
        return self._grow_after * 2 ** max(0, self._failed_growths - 1)

    def state_dict(self) -> dict[str, Any]:
        state = {k: v for k, v in vars(self).items() if k not in ("_configured", "_grow_after")}
        # A configured size was not learned; the config may differ when this is loaded.
        return {**state, "images": None if self.images == self._configured else self.images}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what was learned, up to what is configured now.

        The state of a run that cut micro-batches by bytes is ignored.
        """
        if "unit" in state:
            return
        vars(self).update(state)
        if self._configured is not None:
            self._full = self._configured
            self.images = min(self.images or self._configured, self._configured)
