# Copyright (c) the d2_memfit developers.
"""The quickest cuts of windows into micro-batches that fit, for any number of windows at once."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...iteration import CostModel, MicroBatchShape, Padding

__all__ = ["Cuts", "quickest_cuts"]

_HARDLY_A_PIXEL = 2.0**-20  # sums of it and of whole pixels are exact


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
    shapes: NDArray[Any], cost_model: CostModel, padding: Padding, limit_bytes: float
) -> Cuts:
    """Cut windows so that no micro-batch of several images needs more than a limit.

    Images that follow each other by bytes, by height or by width go together. In each of these
    orders, the quickest cut of the first n images follows from those of fewer.

    Args:
        shapes: height, width and number of objects of images, shape ``(windows, images, 3)``.
    """
    height, width, _ = np.moveaxis(shapes, -1, 0)
    alone = cost_model.bytes_of(MicroBatchShape.from_images(shapes[:, :, None]), padding)
    keys = [(-alone,), (-width, -height), (-height, -width)]  # the last one of each counts most
    order = np.stack([np.lexsort(key) for key in keys])
    # From here on, arrays begin with the shape (orders, windows, images).
    shapes = shapes[np.arange(len(shapes))[:, None], order]
    cut = (*order.shape[:2], order.shape[2] + 1)  # by the number of first images, from 0
    pixels, largest, starts = np.zeros(cut), np.zeros(cut), np.zeros(cut, int)
    # Of equally quick cuts, the one with the fewest micro-batches is taken.
    overhead = cost_model.overhead_pixels + _HARDLY_A_PIXEL
    for end in range(1, cut[2]):
        # The last micro-batch may begin at each image from 0 to end - 1.
        backwards = shapes[:, :, end - 1 :: -1]
        largest_shapes = np.maximum.accumulate(backwards, axis=2)[:, :, ::-1]
        objects = np.add.accumulate(backwards[..., 2], axis=2)[:, :, ::-1]
        height, width, most_objects = np.moveaxis(largest_shapes, -1, 0)
        last = MicroBatchShape(np.arange(end, 0, -1), height, width, objects, most_objects)
        needs = cost_model.bytes_of(last, padding)
        time = pixels[:, :, :end] + last.num * padding.pixels(height, width) + overhead
        time[(needs > limit_bytes) & (last.num > 1)] = np.inf
        needs = np.maximum(needs, largest[:, :, :end])
        start = time.argmin(axis=2)[:, :, None]
        starts[:, :, [end]] = start
        pixels[:, :, [end]] = np.take_along_axis(time, start, axis=2)
        largest[:, :, [end]] = np.take_along_axis(needs, start, axis=2)
    of_window = pixels[:, :, -1].round(3)
    quickest = of_window.argmin(axis=0), np.arange(of_window.shape[1])
    return Cuts(
        order[quickest], starts[quickest][:, 1:], of_window[quickest], largest[quickest][:, -1]
    )
