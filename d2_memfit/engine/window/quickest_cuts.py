# Copyright (c) the d2_memfit developers.
"""The quickest cuts of windows into micro-batches that fit, for any number of windows at once."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...iteration import CostModel, ImageFacts, Padding

__all__ = ["Cuts", "quickest_cuts"]


@dataclass(frozen=True)
class Cuts:
    """Windows of images, cut into micro-batches.

    Attributes:
        order: images of each window in the order that is cut, shape ``(windows, images)``.
        starts: where the last micro-batch of the first n images begins in that order, shape
            ``(windows, images)`` for n from 1.
        pixels: padded pixels of each window, with those that stand for the time of a micro-batch.
        largest_bytes: needs of the largest micro-batch of each window.
    """

    order: NDArray[Any]
    starts: NDArray[Any]
    pixels: NDArray[Any]
    largest_bytes: NDArray[Any]

    def parts(self, window: int) -> list[list[int]]:
        """The images of each micro-batch of a window."""
        parts = []
        end = self.order.shape[1]
        while end:
            start = int(self.starts[window, end - 1])
            parts.append(self.order[window, start:end].tolist())
            end = start
        return parts


def quickest_cuts(
    sizes: NDArray[Any], cost_model: CostModel, padding: Padding, limit_bytes: float
) -> Cuts:
    """Cut windows so that no micro-batch of several images needs more than a limit.

    Images that follow each other by bytes, by height or by width go together. In each of these
    orders, the quickest cut of the first n images follows from those of fewer.

    Args:
        sizes: height, width and number of objects of images, shape ``(windows, images, 3)``.
    """
    height, width, objects = np.moveaxis(sizes, -1, 0)
    ones = np.ones_like(height)
    alone = cost_model.bytes_of(ImageFacts(ones, height, width, objects, objects), padding)
    keys = [(-alone,), (-width, -height), (-height, -width)]  # the last one of each counts most
    order = np.stack([np.lexsort(key) for key in keys])
    # From here on, arrays have the shape (orders, windows, images).
    height, width, objects = np.moveaxis(sizes[np.arange(len(sizes))[:, None], order], -1, 0)
    cut = (*order.shape[:2], order.shape[2] + 1)  # by the number of first images, from 0
    pixels, largest = np.zeros(cut), np.zeros(cut)
    numbers, starts = np.zeros(cut, int), np.zeros(cut, int)
    for end in range(1, cut[2]):
        # The last micro-batch may begin at each image from 0 to end - 1.
        backwards = np.s_[:, :, end - 1 :: -1]
        last = ImageFacts(
            np.arange(end, 0, -1),
            np.maximum.accumulate(height[backwards], axis=2)[:, :, ::-1],
            np.maximum.accumulate(width[backwards], axis=2)[:, :, ::-1],
            np.add.accumulate(objects[backwards], axis=2)[:, :, ::-1],
            np.maximum.accumulate(objects[backwards], axis=2)[:, :, ::-1],
        )
        needs = cost_model.bytes_of(last, padding)
        time = pixels[:, :, :end] + last.num * padding.pixels(last.height, last.width)
        time = time + cost_model.overhead_pixels
        time[(needs > limit_bytes) & (last.num > 1)] = np.inf
        # Of equally quick ones, that with the fewest micro-batches, and then the largest last one.
        quickest = time == time.min(axis=2, keepdims=True)
        start = np.where(quickest, numbers[:, :, :end], cut[2]).argmin(axis=2)[:, :, None]

        def chosen(values: NDArray[Any], start: NDArray[Any] = start) -> NDArray[Any]:
            return np.take_along_axis(values, start, axis=2)[:, :, 0]

        pixels[:, :, end] = chosen(time)
        numbers[:, :, end] = chosen(numbers) + 1
        starts[:, :, end] = start[:, :, 0]
        largest[:, :, end] = np.maximum(chosen(largest), chosen(needs))
    of_order = pixels[:, :, -1].argmin(axis=0), np.arange(len(sizes))
    return Cuts(
        order[of_order],
        starts[of_order][:, 1:],
        pixels[of_order][:, -1],
        largest[of_order][:, -1],
    )
