# Copyright (c) the d2_memfit developers.
"""Run-length encoded masks, moved between frames without decoding.

COCO's code lists how many pixels are off, on, off and so on, down the columns of a frame and from
left to right. An object takes a few hundred bytes in a frame of any size.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as coco_mask

from ..errors import DataError

__all__ = ["Rle", "move"]

Rle = dict[str, Any]  # {"size": [height, width], "counts": bytes, str or list of int}


class _Runs(NamedTuple):
    """Pixels that are on, as pieces of columns: rows ``tops`` to ``bottoms``, each [n]."""

    columns: NDArray[Any]
    tops: NDArray[Any]
    bottoms: NDArray[Any]


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
    columns, tops, bottoms = _runs(rle)
    columns = columns + x
    tops = np.clip(tops + y, 0, height)
    bottoms = np.clip(bottoms + y, 0, height)
    inside = (columns >= 0) & (columns < width) & (tops < bottoms)
    return _encode(_Runs(columns[inside], tops[inside], bottoms[inside]), height, width)


def _runs(rle: Rle) -> _Runs:
    height = rle["size"][0]
    counts = rle["counts"]
    ends = np.cumsum(counts if isinstance(counts, list) else _counts(counts), dtype=np.int64)
    starts = ends[:-1:2]
    ends = ends[1::2]
    starts, ends = starts[: len(ends)][starts < ends], ends[starts < ends]
    # Runs that continue in the next column are cut there.
    pieces = (ends - 1) // height - starts // height + 1
    run = np.repeat(np.arange(len(starts)), pieces)
    nth = np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    columns = starts[run] // height + nth
    top = columns * height
    return _Runs(
        columns, np.maximum(starts[run], top) - top, np.minimum(ends[run], top + height) - top
    )


def _encode(runs: _Runs, height: int, width: int) -> Rle:
    starts = runs.columns * height + runs.tops
    ends = runs.columns * height + runs.bottoms
    # A run that ends where the next begins is joined with it.
    first = np.append(True, starts[1:] != ends[:-1])[: len(starts)]
    last = np.append(first[1:], True)[: len(starts)]
    borders = np.stack([starts[first], ends[last]], axis=1).ravel()
    counts = np.diff(borders, prepend=0, append=height * width)
    counts = counts[: len(counts) - (counts[-1] == 0)]
    return coco_mask.frPyObjects(
        {"size": [height, width], "counts": counts.tolist()}, height, width
    )


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
