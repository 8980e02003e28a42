# Copyright (c) the d2_memfit developers.
"""Positions of tiles."""

import pytest

from d2_memfit.predict.tiles import Grid


@pytest.mark.parametrize(
    ("length", "size", "overlap", "starts"),
    [
        (1000, 512, 102, [0, 410, 488]),  # as sahi.slicing.get_slice_bboxes gives them
        (100, 512, 100, [0]),
        (513, 512, 511, [0, 1]),
    ],
)
def test_tiles_cover_the_image_and_have_one_size(length, size, overlap, starts):
    grid = Grid(length, length, size, overlap)
    assert [grid[i].x0 for i in range(len(grid.lefts))] == starts
    assert len(grid) == len(starts) ** 2
    assert {(t.height, t.width) for t in (grid[i] for i in range(len(grid)))} == {
        (min(size, length), min(size, length))
    }
    assert grid[len(grid) - 1][2:] == (length, length)


def test_tiles_come_row_by_row():
    grid = Grid(200, 300, 100, 0)
    corners = [grid[i][:2] for i in range(len(grid))]
    assert corners == [(x, y) for y in (0, 100) for x in (0, 100, 200)]
