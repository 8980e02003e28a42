# Copyright (c) the d2_memfit developers.
"""The bytes that a micro-batch needs, predicted from its images' shapes and objects."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

__all__ = ["FEATURES", "CostModel", "MicroBatchShape", "Padding", "largest_sum"]

# The features of a sum in MEMFIT.COST_MODEL.BYTES, in order.
FEATURES = (
    "the process",
    "image",
    "padded pixel",
    "object",
    "padded pixel x object",
    "padded pixel x object of the most crowded",
)


@dataclass(frozen=True)
class Padding:
    """A model's padding of the images of a batch to one size.

    Args:
        divisor: height and width are rounded up to multiples of it.
        square: fixed height and width of all batches, in pixels; 0 for none.
    """

    divisor: int = 1
    square: int = 0

    @classmethod
    def from_model(cls, model: nn.Module) -> "Padding":
        """The padding of a model, from Detectron2's attributes."""
        divisors, squares = [1], [0]
        for module in model.modules():
            constraints = getattr(module, "padding_constraints", None) or {}
            divisors.append(getattr(module, "size_divisibility", 0))
            squares.append(constraints.get("square_size", 0))
        return cls(max(divisors), max(squares))

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Padded height and width of a batch with this largest height and width, in pixels."""
        if self.square:
            return self.square, self.square
        d = self.divisor
        return -(-height // d) * d, -(-width // d) * d

    def pixels(self, height: int, width: int) -> int:
        """Padded pixels of one image in such a batch."""
        return math.prod(self.size(height, width))


@dataclass(frozen=True)
class MicroBatchShape:
    """The images of a micro-batch, as far as they determine its memory.

    With arrays in place of numbers, it describes many micro-batches.

    Args:
        num: number of images.
        height, width: the largest of each, in pixels.
        objects: annotated objects in all images.
        most_objects: annotated objects in the most crowded image.
    """

    num: Any
    height: Any
    width: Any
    objects: Any
    most_objects: Any

    @classmethod
    def from_images(cls, shapes: NDArray[Any]) -> "MicroBatchShape":
        """The shapes of micro-batches.

        Args:
            shapes: height, width and number of objects of images, shape ``(..., images, 3)``.
        """
        height, width, most_objects = np.moveaxis(shapes.max(axis=-2), -1, 0)
        return cls(shapes.shape[-2], height, width, shapes[..., 2].sum(axis=-1), most_objects)

    def features(self, padding: Padding) -> tuple[float, ...]:
        """One number for each of ``FEATURES``."""
        pixels = padding.pixels(self.height, self.width)
        per_object = (self.objects, pixels * self.objects, pixels * self.most_objects)
        return (1, self.num, self.num * pixels, *per_object)


@dataclass(frozen=True)
class CostModel:
    """The predicted memory of micro-batches, and its limit.

    The peak of a micro-batch is in its forward or in its backward, and each grows in its own way.
    Therefore there are several sums; the largest counts.

    Args:
        sums: bytes for each of ``FEATURES``.
        limit_bytes: memory of the process that a micro-batch may need.
        overhead_pixels: time of a micro-batch in addition to its images' time, in padded pixels.
    """

    sums: tuple[tuple[float, ...], ...]
    limit_bytes: int
    overhead_pixels: float = 0.0

    def bytes_of(self, images: MicroBatchShape, padding: Padding) -> Any:
        """Bytes of a micro-batch; of many if the shape has arrays."""
        return largest_sum(self.sums, images.features(padding))


def largest_sum(sums: Sequence[Sequence[float]], features: Sequence[Any]) -> Any:
    """The largest of sums that have a number for each feature."""
    return np.maximum.reduce([sum(b * x for b, x in zip(numbers, features)) for numbers in sums])
