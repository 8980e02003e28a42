# Copyright (c) the d2_memfit developers.
"""Tiles: their positions, masks that are moved between them, and objects that are merged."""

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from d2_memfit.common.errors import DataError
from d2_memfit.predict.tiles import Detection, Grid, SeamMerger, move


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


def boxes_of_tiles(grid, objects):
    """What a perfect detector without masks finds in each tile, merged."""
    tiles = []
    for tile in (grid[i] for i in range(len(grid))):
        shown = np.clip(objects, [tile.x0, tile.y0] * 2, [tile.x1, tile.y1] * 2)
        is_seen = (shown[:, 2:] > shown[:, :2]).all(axis=1)
        tiles.append([Detection(box, 0.9, 0) for box in shown[is_seen]])
    return sorted(d.box.tolist() for d in merged(grid, tiles))


@pytest.mark.parametrize(
    "objects",
    [
        [(150, 20, 330, 220), (240, 100, 270, 130)],  # a small one on a large one
        [(100, 20, 234, 120), (206, 20, 340, 120)],  # two that overlap, one in each tile
        [(10, 10, 440, 440), (180, 180, 260, 260)],  # on one that is whole in no tile
    ],
)
def test_objects_of_one_category_that_overlap_stay_two(objects):
    assert boxes_of_tiles(Grid(448, 448, 256, 64), np.array(objects, float)) == sorted(
        list(map(float, box)) for box in objects
    )


def test_parts_that_agree_are_united_where_no_border_seems_to_cut_them():
    grid = Grid(256, 448, 256, 64)
    parts = [[60.0, 50, 250, 200], 0.9], [[198.0, 50, 400, 200], 0.8]
    tiles = [[Detection(np.array(box), score, 0)] for box, score in parts]
    assert [d.box.tolist() for d in merged(grid, tiles)] == [[60, 50, 400, 200]]
    tiles[0].append(Detection(np.array([200.0, 90, 230, 120]), 0.7, 0))  # whole, on the other
    assert len(merged(grid, tiles)) == 2


def test_objects_of_two_categories_in_one_place_stay_two():
    box = np.array([60.0, 10, 90, 40])
    tiles = [Detection(box, 0.9, 0)], [Detection(box, 0.8, 1), Detection(box + 1, 0.7, 0)]
    found = merged(Grid(100, 150, 100, 50), tiles)
    assert [(d.category, d.score) for d in found] == [(0, 0.9), (1, 0.8)]
    assert found[0].box.tolist() == box.tolist()  # whole in both: what the better one says


def merged(grid, found_in_tiles):
    """All objects of some tiles."""
    merger = SeamMerger(grid, 0.5)
    found = []
    for i, detections in enumerate(found_in_tiles):
        found += merger.add(grid[i], detections)
    return [*found, *merger.finish()]


def test_an_object_that_all_rows_of_tiles_show_comes_once():
    tall = [50.0, 20, 90, 980]
    assert boxes_of_tiles(Grid(1000, 200, 200, 50), np.array([tall])) == [tall]


@pytest.mark.parametrize("scores", [(0.9, 0.6, 0.7), (0.6, 0.9, 0.7), (0.6, 0.7, 0.9)])
def test_an_object_has_its_parts_highest_score_and_the_box_of_that_part_if_it_is_whole(scores):
    grid = Grid(100, 200, 100, 50)
    bounds = [(90, 100), (90, 150), (100, 190)]
    parts = [[Detection(np.array([x, 40.0, y, 60]), s, 0)] for (x, y), s in zip(bounds, scores)]
    (cut,) = merged(grid, parts)
    assert (cut.box.tolist(), cut.score) == ([90, 40, 190, 60], 0.9)
    whole = [np.array([60.0, 10, 90, 40 + i]) for i in range(2)]
    (found,) = merged(grid, [[Detection(box, s, 0)] for box, s in zip(whole, scores)])
    assert found.score == max(scores[:2])
    assert found.box.tolist() == whole[np.argmax(scores[:2])].tolist()


def test_a_mask_is_the_union_of_the_masks_in_its_tiles():
    grid = Grid(100, 150, 100, 50)
    pixels = np.zeros((100, 150), np.uint8)
    pixels[20:80, 30:120] = 1
    pixels[40:60, 60:90] = 0  # a hole, which both tiles show
    found = []
    for i in range(2):
        tile = grid[i]
        shown = np.asfortranarray(pixels[:, tile.x0 : tile.x1])
        box = [max(30, tile.x0), 20, min(120, tile.x1), 80]
        found.append([Detection(np.array(box, float), 0.5, 0, coco_mask.encode(shown))])
    (one,) = merged(grid, found)
    assert (coco_mask.decode(one.mask) == pixels).all()
    assert one.box.tolist() == [30, 20, 120, 80]
