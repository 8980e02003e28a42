# Copyright (c) the d2_memfit developers.
"""Cutting a window into micro-batches by their predicted memory."""

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, Optional, Union

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ...errors import ConfigError
from ...iteration import CostModel, ImageFacts, Padding
from ...job import size_of
from .columns import Row
from .micro_batch_size import MicroBatchSize
from .quickest_cuts import Cuts, quickest_cuts
from .window import MicroBatch, Window, count_objects

__all__ = ["ByteCut", "SizeLimit"]

logger = logging.getLogger(__name__)

_GB = 2**30
_PARTS = 1024  # of the bytes for images


class ByteCut:
    """Cuts windows so that each micro-batch is predicted to fit.

    An image that is predicted not to fit goes alone. Among the cuts that fit, the quickest is
    taken: few micro-batches with little padding. A micro-batch that fails nevertheless lowers the
    limit, as :class:`MicroBatchSize` lowers the number of images.

    Args:
        cost_model: the memory of micro-batches, and the limit.
        model: its padding of images is used.
        grow_after: as for :class:`MicroBatchSize`.

    Attributes:
        images: None, as micro-batches are taken as they were cut.
        needs_bytes: of the largest micro-batch of the last window.
    """

    images: Optional[int] = None

    def __init__(self, cost_model: CostModel, model: nn.Module, grow_after: int) -> None:
        self.cost_model = cost_model
        self.needs_bytes = 0.0
        self._padding = Padding.of(model)
        self._share = MicroBatchSize(_PARTS, grow_after)  # share of the bytes for images, in parts
        self._base = cost_model.bytes_before_images
        self._room = cost_model.limit_bytes - self._base
        if self._room <= 0:
            logger.warning(
                "MEMFIT.COST_MODEL: the process needs %.2f GB before its first image, and the "
                "budget leaves %.2f GB, so each image goes through the model alone",
                self._base / _GB,
                cost_model.limit_bytes / _GB,
            )

    @property
    def limit(self) -> float:
        """Memory, in GB, that the process may need with a micro-batch of several images."""
        return (self._base + self._room * (self._share.images or _PARTS) / _PARTS) / _GB

    def micro_batches(self, images: Sequence[Any]) -> list[list[Any]]:
        """Cut images into micro-batches, the largest first, while there are no gradients yet.

        Raises:
            ConfigError: the size of an image is not known.
        """
        facts = [_facts_of(image) for image in images]
        sizes = [(f.height, f.width, f.objects) for f in facts]
        cuts = self.quickest(np.array([sizes]))
        self.needs_bytes = float(cuts.largest_bytes[0])
        parts = cuts.parts(0)
        parts.sort(key=lambda part: -self._bytes_of(_together(facts[i] for i in part)))
        return [[images[i] for i in part] for part in parts]

    def quickest(self, sizes: NDArray[Any]) -> Cuts:
        """Cut windows of images with these heights, widths and numbers of objects.

        Args:
            sizes: shape ``(windows, images, 3)``.
        """
        return quickest_cuts(sizes, self.cost_model, self._padding, self.limit * _GB)

    def _bytes_of(self, images: ImageFacts) -> Any:
        return self.cost_model.bytes_of(images, self._padding)

    def described(self) -> str:
        return f"{self.limit:.2f} GB"

    def lower(self, largest: Optional[MicroBatch], window: Optional[Window] = None) -> str:
        """Halve the limit, or let no micro-batch need more than half of the largest's bytes."""
        parts = self._share.images or _PARTS
        if largest is not None:
            needs = self._bytes_of(_together(map(_facts_of, largest.data))) - self._base
            share = needs / self._room if self._room > 0 else 0
            # Rounded up: of images of one size, half as many must fit.
            parts = min(_PARTS, math.ceil(_PARTS * share) + 1)
        self._share.halve(max(2, parts))
        if window is not None:
            window.cut(self.micro_batches)
        return f"micro-batches of several images are limited to {self.described()}"

    def end_iteration(self, clean: bool) -> bool:
        return self._share.end_iteration(clean)

    def state_dict(self) -> dict[str, Any]:
        return {**self._share.state_dict(), "unit": "bytes"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the limit. The state of a run that counted images is ignored."""
        if state.get("unit") == "bytes":
            self._share.load_state_dict({k: v for k, v in state.items() if k != "unit"})


SizeLimit = Union[MicroBatchSize, ByteCut]  # what limits micro-batches, in images or in bytes


def _facts_of(image: Any) -> ImageFacts:
    height, width = size_of(list(image.parts) if isinstance(image, Row) else image)
    if not height:
        raise ConfigError(
            "MEMFIT.COST_MODEL.BYTES needs images whose size is known, in dataset dicts with an "
            f'"image" or as tensors in columns, got a {type(image).__name__}'
        )
    return ImageFacts.one(height, width, count_objects(image))


def _together(images: Iterable[ImageFacts]) -> ImageFacts:
    return sum(images, ImageFacts())
