# Copyright (c) the d2_memfit developers.
"""Objects in overlapping tiles, merged."""

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from d2_memfit.predict.tiles import Detection, Grid, SeamMerger


def boxes_of_tiles(grid, objects):
    """What a perfect detector without masks finds in each tile, merged."""
    merger, found = SeamMerger(grid, 0.5), []
    for i in range(len(grid)):
        tile = grid[i]
        shown = np.clip(objects, [tile.x0, tile.y0] * 2, [tile.x1, tile.y1] * 2)
        is_seen = (shown[:, 2:] > shown[:, :2]).all(axis=1)
        found += merger.add(tile, [Detection(box, 0.9, 0) for box in shown[is_seen]])
    return sorted(d.box.tolist() for d in [*found, *merger.finish()])


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
    merger = SeamMerger(grid, 0.5)
    found = [*merger.add(grid[0], [Detection(np.array([60.0, 50, 250, 200]), 0.9, 0)])]
    found += merger.add(grid[1], [Detection(np.array([198.0, 50, 400, 200]), 0.8, 0)])
    found += merger.finish()
    assert [d.box.tolist() for d in found] == [[60, 50, 400, 200]]


def test_objects_of_two_categories_in_one_place_stay_two():
    grid = Grid(100, 150, 100, 50)
    merger = SeamMerger(grid, 0.5)
    box = np.array([60.0, 10, 90, 40])
    found = [*merger.add(grid[0], [Detection(box, 0.9, 0)])]
    found += merger.add(grid[1], [Detection(box, 0.8, 1), Detection(box + 1, 0.7, 0)])
    found += merger.finish()
    assert [(d.category, d.score) for d in found] == [(0, 0.9), (1, 0.8)]
    assert found[0].box.tolist() == box.tolist()  # whole in both: what the better one says


def merged(grid, found_in_tiles):
    """All objects of a row of tiles."""
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
