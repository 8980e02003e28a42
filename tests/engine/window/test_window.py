# Copyright (c) the d2_memfit developers.
"""The order of a window's images, however it is loaded, cut and taken again."""

import pytest
from detectron2.structures import Instances

from d2_memfit.engine.window import Window, count_objects

BATCHES = [[{"image_id": i} for i in ids] for ids in ((0, 1, 2, 3), (4, 5, 6), (7,))]


def ids(micro_batch):
    return [image["image_id"] for image in micro_batch.data]


def taken(window, *sizes, across_batches=True):
    """Micro-batches of these sizes, the last one again and again until the window's end."""
    sizes = list(sizes)
    found = []
    while (m := window.take(sizes[0], across_batches)) is not None:
        found.append(ids(m))
        if len(sizes) > 1:
            sizes.pop(0)
    return found


@pytest.mark.parametrize("is_loaded", [False, True])
@pytest.mark.parametrize(
    ("across_batches", "expected"),
    [
        (True, [[0, 1, 2], [3, 4, 5], [6, 7]]),
        (False, [[0, 1, 2], [3], [4, 5, 6], [7]]),
    ],
)
def test_images_come_in_the_loaders_order(is_loaded, across_batches, expected):
    window = Window(iter(BATCHES), 3)
    if is_loaded:
        window.load_all()
    assert taken(window, 3, across_batches=across_batches) == expected
    assert window.num_images == 8
    assert window.expected_images == 12  # three times the first batch


@pytest.mark.parametrize("is_loaded", [False, True])
def test_images_put_back_come_next_in_smaller_pieces(is_loaded):
    window = Window(iter(BATCHES), 3)
    if is_loaded:
        window.load_all()
    assert ids(window.take(3)) == [0, 1, 2]
    window.put_back()
    assert taken(window, 1, 2) == [[0], [1, 2], [3, 4], [5, 6], [7]]
    window.put_all_back()
    assert taken(window, 8) == [list(range(8))]


def test_a_batch_is_loaded_when_its_first_image_is_needed():
    loaded = []
    window = Window((loaded.append(batch) or batch for batch in BATCHES), 3)
    for num_images, expected in ((4, 1), (2, 2), (1, 2), (1, 3)):
        window.take(num_images)
        assert len(loaded) == expected


def test_of_two_equal_images_the_one_that_is_meant_is_replaced():
    one, other = {"image_id": 0}, {"image_id": 0}
    window = Window(iter([[one, other]]), 1)
    window.load_all()
    window.replace(other, {"image_id": 1})
    assert taken(window, 2) == [[0, 1]]


def test_instances_without_fields_are_no_objects():
    batch = [{"instances": Instances((8, 8))}, {"labels": [1, 2]}, {"boxes": 5}]
    assert count_objects(batch) == 2
