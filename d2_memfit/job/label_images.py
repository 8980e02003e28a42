# Copyright (c) the d2_memfit developers.
"""Label images: the classes in those of a dataset, and invented ones with as many."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from detectron2.data.detection_utils import read_image

from ..common.reading import checked

__all__ = ["Labels", "labels_in", "tiles"]

_MOST_FILES = 100  # label images that are read: 5 CPU s for the 2 megapixels of Cityscapes
_TILE = 8  # pixels of a tile's side, at most
_TIMES = 4  # that an image has each value, at least, unless it has too few pixels
_GOLDEN = 0.618  # its multiples are spread evenly


@dataclass(frozen=True)
class Labels:
    """Classes in a dataset's label images.

    Attributes:
        values: labels in the image with the most classes.
        classes_per_image: number of classes in each image that was read, the largest first.
    """

    values: tuple[int, ...]
    classes_per_image: tuple[int, ...]


@lru_cache(maxsize=4)
def labels_in(files: tuple[str, ...], ignored: frozenset[int]) -> Labels:
    """Read label images, at most 100 and evenly spread, and count their classes.

    Args:
        files: paths, as in "sem_seg_file_name" of Detectron2's dataset dicts.
        ignored: labels of pixels without a class.
    """
    num_read = min(len(files), _MOST_FILES)
    read = [files[i * len(files) // num_read] for i in range(num_read)]
    found = [np.unique(read_image(checked(file))) for file in read]
    found = [labels[~np.isin(labels, list(ignored))] for labels in found]
    numbers = sorted(map(len, found), reverse=True)
    return Labels(tuple(max(found, key=len).tolist()), tuple(numbers))


def tiles(size: tuple[int, int], values: Sequence[Any]) -> Any:
    """Make an image of small tiles, with all values in each part that a crop may take.

    Args:
        size: height and width in pixels.
        values: values of tiles, numbers or colors, in turn; 0 if there are none.

    Returns:
        ndarray: [height, width], or [height, width, 3] for colors.
    """
    palette = np.asarray(values or [0])
    palette = palette.astype(np.uint8 if palette.max() < 256 else np.uint16)
    num = len(palette)
    side = max(1, min(_TILE, math.isqrt(math.prod(size) // (_TIMES * num))))
    rows, columns = (np.arange(-(-length // side)) for length in size)
    # Rows begin far from each other, so that a few of them have all values.
    image = palette[(columns + round(_GOLDEN * num) * rows[:, None]) % num]
    return image.repeat(side, axis=0).repeat(side, axis=1)[: size[0], : size[1]]
