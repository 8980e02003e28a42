# Copyright (c) the d2_memfit developers.
"""The limit of micro-batches, in images or in bytes, learned from what did not fit."""

import logging
import math
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ...common.units import GB
from ...errors import ConfigError
from ...iteration import CostModel, MicroBatchShape, Padding
from ...job import size_of
from .columns import Row
from .quickest_cuts import Cuts, quickest_cuts
from .window import MicroBatch, Window, count_objects

__all__ = ["ByteCutter", "Cutter"]

logger = logging.getLogger(__name__)

_PARTS = 1024  # of the bytes for images
_LEARNED = ("_full", "_clean_iterations", "_failed_growths", "_has_just_grown")


class Cutter:
    """Cuts windows into micro-batches within a limit, and learns the limit from what does not fit.

    The limit is a number of images. It is halved when memory runs out, and doubled after a while
    without errors. If a limit fails again after it has grown, the wait before the next growth
    doubles, from the second failure in a row on.

    Args:
        configured: images per micro-batch; None for the loader's batch.
        grow_after: iterations without an out-of-memory error before the limit is doubled.

    Attributes:
        limit: the current limit; infinity means no limit.
        is_configured: whether micro-batches have a limit before anything fails.
    """

    unit = "images"  # of the limit

    def __init__(self, configured: Optional[int], grow_after: int) -> None:
        self.is_configured = configured is not None
        self.limit: float = configured or math.inf
        self._configured = self.limit
        self._grow_after = grow_after
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

    def cut(self, window: Window) -> None:
        """Cut the rest of a window now. Only limits in bytes need it."""

    def take(self, window: Window) -> Optional[MicroBatch]:
        """Take a window's next micro-batch; None at its end.

        A learned limit does not put images of several batches together.
        """
        return window.take(self.images, across_batches=self.is_configured)

    def lower(self, largest: MicroBatch, window: Optional[Window] = None) -> str:
        """Halve the limit.

        Args:
            largest: a micro-batch that can be split and must not be taken whole again.
            window: its remaining images are cut again.

        Returns:
            str: what was done, for the log.
        """
        failed = self._limit_of(largest)
        self._full = max(self._full, failed)
        self._failed_growths += self._has_just_grown
        self._has_just_grown = False
        self._clean_iterations = 0
        self.limit = failed // 2
        if window is not None:
            self.cut(window)
        return f"the micro-batch is halved to {self.described()}"

    def end_iteration(self, clean: bool) -> bool:
        """Count an iteration, which had enough memory (``clean``) or not.

        Returns:
            bool: whether the limit has grown.
        """
        self._clean_iterations = self._clean_iterations + 1 if clean else 0
        if self._clean_iterations < self._grow_after * 2 ** max(0, self._failed_growths - 1):
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
        """Restore what was learned, up to what is configured now.

        The state of a limit in another unit is ignored.
        """
        if state.get("unit", "images") != self.unit:
            return
        vars(self).update({k: state[k] for k in _LEARNED if k in state})
        self.limit = min(state["images"] or math.inf, self._configured)
        if self.is_configured:
            self._full = self._configured

    def _limit_of(self, micro_batch: MicroBatch) -> float:
        """The limit that a micro-batch just keeps to."""
        return micro_batch.num_images


class ByteCutter(Cutter):
    """Cuts windows so that each micro-batch is predicted to fit.

    An image that is predicted not to fit runs alone. Among the cuts that fit, the quickest one is
    used: few micro-batches with little padding. The limit is a share of the bytes for images, in
    parts of 1024.

    Args:
        cost_model: predicts the memory of micro-batches, and has the limit.
        model: images are padded as it pads them.
        grow_after: as for :class:`Cutter`.

    Attributes:
        images: None, as micro-batches are taken as they were cut.
        needs_bytes: predicted bytes of the largest micro-batch of the last window.
    """

    unit = "bytes"
    images: Optional[int] = None

    def __init__(self, cost_model: CostModel, model: nn.Module, grow_after: int) -> None:
        super().__init__(_PARTS, grow_after)
        self.cost_model = cost_model
        self.needs_bytes = 0.0
        self._padding = Padding.from_model(model)
        self._base = max(numbers[0] for numbers in cost_model.sums)  # before the first image
        self._room = cost_model.limit_bytes - self._base
        if self._room <= 0:
            logger.warning(
                "MEMFIT.COST_MODEL: the process needs %.2f GB before its first image, and the "
                "budget leaves %.2f GB, so each image goes through the model alone",
                self._base / GB,
                cost_model.limit_bytes / GB,
            )

    @property
    def limit_bytes(self) -> float:
        """Memory that the process may need with a micro-batch of several images."""
        parts = self.limit if self.limit > 1 else 0  # images below a part go alone, too
        return self._base + self._room * parts / _PARTS

    def described(self) -> str:
        return f"{self.limit_bytes / GB:.2f} GB"

    def cut(self, window: Window) -> None:
        window.cut(self.micro_batches)

    def micro_batches(self, images: Sequence[Any]) -> list[list[Any]]:
        """Cut images into micro-batches, the largest first, while there are no gradients yet.

        Raises:
            ConfigError: the size of an image is not known.
        """
        shapes = _shapes_of(images)
        cuts = self.quickest(shapes[None])
        self.needs_bytes = float(cuts.largest_bytes[0])
        parts = sorted(cuts.parts(0), key=lambda part: -self.bytes_of(shapes[part]))
        return [[images[i] for i in part] for part in parts]

    def quickest(self, shapes: NDArray[Any]) -> Cuts:
        """Cut windows of images, as :func:`quickest_cuts` does."""
        return quickest_cuts(shapes, self.cost_model, self._padding, self.limit_bytes)

    def bytes_of(self, shapes: NDArray[Any]) -> Any:
        """Bytes of micro-batches.

        Args:
            shapes: as for :meth:`MicroBatchShape.from_images`.
        """
        return self.cost_model.bytes_of(MicroBatchShape.from_images(shapes), self._padding)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "unit": self.unit}

    def _limit_of(self, micro_batch: MicroBatch) -> float:
        needs = self.bytes_of(_shapes_of(micro_batch.data)) - self._base
        share = needs / self._room if self._room > 0 else 0
        # Rounded up: of images of one size, half as many must fit.
        return max(2, min(self.limit, math.ceil(_PARTS * share) + 1))


def _shapes_of(images: Sequence[Any]) -> NDArray[Any]:
    shapes = []
    for image in images:
        height, width = size_of(list(image.parts) if isinstance(image, Row) else image)
        if not height:
            raise ConfigError(
                "MEMFIT.COST_MODEL.BYTES needs images whose size is known, in dataset dicts with "
                f'an "image" or as tensors in columns, got a {type(image).__name__}'
            )
        shapes.append((height, width, count_objects(image)))
    return np.array(shapes)
