# Copyright (c) the d2_memfit developers.
"""Run-length encoded masks, moved between frames without decoding.

pycocotools can only move a mask by way of all pixels of the frame: 400 MB for each object of an
image of 20,000 x 20,000. COCO's code lists how many pixels are off, on, off and so on, down the
columns and from left to right, so an object takes a few hundred bytes in a frame of any size.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

from ..errors import DataError

__all__ = ["Rle", "move"]

Rle = dict[str, Any]  # {"size": [height, width], "counts": bytes, str or list of int}


def move(rle: Rle, x: int, y: int, height: int, width: int) -> Rle:
    """Move a mask to another frame of this height and width. Pixels outside are dropped.

    Args:
        x, y: position of the old frame's corner in the new one, in pixels.

    Raises:
        DataError: the frame has more pixels than the code can count.
    """
    if height * width >= 2**32:
        raise DataError(
            f"an image of {width} x {height} pixels has more than COCO's run-length code can "
            "count, 2^32 - 1: cut the image in two"
        )
    old_height, counts = rle["size"][0], rle["counts"]
    ends = np.cumsum(counts if isinstance(counts, list) else _counts(counts), dtype=np.int64)
    starts, ends = ends[: len(ends) // 2 * 2 : 2], ends[1::2]  # of runs of pixels that are on
    # Each run is cut into pieces of one column.
    pieces = (ends - 1) // old_height - starts // old_height + 1
    run = np.repeat(np.arange(len(starts)), pieces)
    nth = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    column = starts[run] // old_height + nth
    top = np.clip(np.maximum(starts[run] - column * old_height, 0) + y, 0, height)
    bottom = np.clip(np.minimum(ends[run] - column * old_height, old_height) + y, 0, height)
    column += x
    inside = (column >= 0) & (column < width) & (top < bottom)
    places = np.stack([top, bottom])[:, inside] + column[inside] * height
    # Where a piece ends and the next one begins, there is no border.
    borders, times = np.unique(places, return_counts=True)
    new = np.diff(borders[times == 1], prepend=0, append=height * width)
    new = new[: len(new) - (new[-1] == 0)]
    return coco_mask.frPyObjects({"size": [height, width], "counts": new.tolist()}, height, width)


def _counts(code: Any) -> NDArray[Any]:
    """Decode COCO's text of counts: groups of 5 bits, low bits first. Each number is stored as
    the difference to the last but one (``rleFrString`` in cocoapi/common/maskApi.c).
    """
    text = np.frombuffer(code.encode() if isinstance(code, str) else code, np.uint8)
    groups = text.astype(np.int64) - 48
    is_last = (groups & 32) == 0
    firsts = np.flatnonzero(np.append(True, is_last[:-1]))
    lengths = np.diff(firsts, append=len(groups))
    shifts = 5 * (np.arange(len(groups)) - np.repeat(firsts, lengths))
    numbers = np.add.reduceat((groups & 31) << shifts, firsts)
    is_negative = (groups[is_last] & 16) != 0
    numbers -= np.where(is_negative, 1 << (5 * lengths), 0)
    numbers[1::2] = np.cumsum(numbers[1::2])
    numbers[2::2] = np.cumsum(numbers[2::2])
    return numbers
