# Copyright (c) the d2_memfit developers.
"""Masks that are moved between frames, against masks of pixels."""

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from d2_memfit.common.errors import DataError
from d2_memfit.predict.tiles import move


@pytest.mark.parametrize("as_text", [False, True])
def test_masks_are_moved_between_frames_without_decoding(as_text):
    rng = np.random.default_rng(0)
    for height, width, x, y, new in [(9, 7, 3, 2, (20, 30)), (40, 50, -11, -13, (17, 19))]:
        for density in (0.0, 0.3, 0.7, 1.0):
            mask = (rng.random((height, width)) < density).astype(np.uint8)
            rle = coco_mask.encode(np.asfortranarray(mask))
            if as_text:
                rle["counts"] = rle["counts"].decode()
            expected = np.zeros((80, 80), np.uint8)
            expected[20 + y : 20 + y + height, 20 + x : 20 + x + width] = mask
            expected = expected[20 : 20 + new[0], 20 : 20 + new[1]]
            moved = move(rle, x, y, *new)
            assert (coco_mask.decode(moved) == expected).all()
            assert moved["counts"] == coco_mask.encode(np.asfortranarray(expected))["counts"]


def test_a_mask_in_an_image_of_50000_pixels_costs_bytes():
    small = coco_mask.encode(np.ones((30, 40), np.uint8, order="F"))
    placed = move(small, 49_000, 48_000, 50_000, 50_000)
    assert coco_mask.toBbox(placed).tolist() == [49_000, 48_000, 40, 30]
    assert coco_mask.area(placed) == 1200
    assert len(placed["counts"]) < 500
    back = move(placed, -49_000, -48_000, 30, 40)
    assert back["counts"] == small["counts"]
    with pytest.raises(DataError, match="70000 x 70000 pixels has more than"):
        move(small, 0, 0, 70_000, 70_000)
