# Copyright (c) the d2_memfit developers.
"""Cutting a window into micro-batches by their predicted memory."""

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any, Optional, Union

from torch import nn

from ...errors import ConfigError
from ...iteration import CostModel, ImageFacts, Padding
from ...job import size_of
from .columns import Row
from .micro_batch_size import MicroBatchSize
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
    """

    images: Optional[int] = None

    def __init__(self, cost_model: CostModel, model: nn.Module, grow_after: int) -> None:
        self._cost_model = cost_model
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
        need = [self._bytes_of(f) for f in facts]
        orders = (
            sorted(range(len(images)), key=key, reverse=True)
            for key in (
                lambda i: need[i],
                lambda i: (facts[i].height, facts[i].width),
                lambda i: (facts[i].width, facts[i].height),
            )
        )
        _, parts = min((self._cheapest(order, facts) for order in orders), key=lambda c: c[0])
        parts.sort(key=lambda part: -self._bytes_of(_together(facts[i] for i in part)))
        return [[images[i] for i in part] for part in parts]

    def _cheapest(
        self, order: Sequence[int], facts: Sequence[ImageFacts]
    ) -> tuple[float, list[Any]]:
        """The quickest way to cut images in this order, and its time in padded pixels."""
        # For each number of first images: time, micro-batches, start of the last one.
        best: list[tuple[float, int, int]] = [(0.0, 0, 0)]
        for end in range(1, len(order) + 1):
            found = (float("inf"), 0, 0)
            together = ImageFacts()
            for start in range(end - 1, -1, -1):
                together += facts[order[start]]
                if together.num > 1 and self._bytes_of(together) > self.limit * _GB:
                    break
                pixels = together.num * self._padding.pixels(together.height, together.width)
                seconds = best[start][0] + pixels + self._cost_model.overhead_pixels
                found = min(found, (seconds, best[start][1] + 1, start))
            best.append(found)
        parts = []
        end = len(order)
        while end:
            start = best[end][2]
            parts.append(list(order[start:end]))
            end = start
        return best[-1][0], parts

    def _bytes_of(self, images: ImageFacts) -> float:
        return self._cost_model.bytes_of(images, self._padding)

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
