# Copyright (c) the d2_memfit developers.
"""Images that are held out: as many as asked for, the same each time, of all classes."""

import random
from collections import Counter
from pathlib import Path

import pytest
from small_datasets import coco_of

from d2_memfit.data.hold_out import hold_out
from d2_memfit.data.label_files import Split
from d2_memfit.errors import ConfigError


def split(coco, share):
    train, val = hold_out(Split("train", coco, Path("images")), share)
    assert (train.name, val.name) == ("train", "val")
    ids = [{image["id"] for image in part.coco["images"]} for part in (train, val)]
    assert not ids[0] & ids[1]
    assert ids[0] | ids[1] == {image["id"] for image in coco["images"]}
    for part, images in zip((train, val), ids):
        expected = [a for a in coco["annotations"] if a["image_id"] in images]
        assert part.coco["annotations"] == expected
        assert part.coco["categories"] == coco["categories"]
    return ids


def images_by_class(coco, images):
    pairs = {(a["category_id"], a["image_id"]) for a in coco["annotations"]}
    return Counter(c for c, image in pairs if image in images)


@pytest.mark.parametrize(
    ("number", "share"), [(80, 0.2), (18, 0.2), (100, 0.33), (10, 0.5), (9, 0.9)]
)
def test_the_share_is_that_of_the_images(number, share):
    _, held = split(coco_of(number), share)
    assert len(held) == int(number * share)


def test_the_same_images_are_held_out_whatever_their_order():
    coco = coco_of(40, lambda i: [i % 3])
    _, held = split(coco, 0.25)
    for seed in range(3):
        random.Random(seed).shuffle(coco["images"])
        random.Random(seed).shuffle(coco["annotations"])
        assert split(coco, 0.25)[1] == held
    _, held = split(coco_of(40), 0.25)
    assert held != set(sorted(range(40), key=str)[:10])  # they are drawn


@pytest.mark.parametrize("seed", range(20))
def test_each_class_with_enough_images_is_in_both_parts(seed):
    rng = random.Random(seed)
    share = rng.choice([0.1, 0.2, 0.3, 0.5])
    classes = rng.randint(2, 30)
    weights = [1 / (c + 1) ** 2 for c in range(classes)]  # few images have the last ones
    drawn = [rng.choices(range(classes), weights, k=rng.randint(0, 5)) for _ in range(300)]
    coco = coco_of(300, lambda i: drawn[i])
    train, held = split(coco, share)
    total = images_by_class(coco, train | held)
    kept, taken = images_by_class(coco, train), images_by_class(coco, held)
    for c, number in total.items():
        assert kept[c] > 0
        assert taken[c] >= min(int(share * number), 1)
        assert abs(taken[c] - share * number) <= max(5, 0.25 * number)
    assert abs(len(held) - share * 300) <= max(2, 0.05 * 300)


def test_images_without_objects_are_held_out_too():
    _, held = split(coco_of(100, lambda i: [1] if i < 10 else []), 0.2)
    assert len(held) == 20
    assert 2 <= len(held & set(range(10))) <= 4


def test_a_class_of_one_image_is_trained_on():
    train, held = split(coco_of(10, lambda i: [1, 2] if i == 3 else [1]), 0.9)
    assert 3 in train
    assert len(held) == 9


@pytest.mark.parametrize("share", [0, 1, -0.2, 2, 1e-9, 0.09, float("nan"), float("inf")])
def test_a_share_that_leaves_a_part_empty_is_refused(share):
    with pytest.raises(ConfigError, match=r"^--hold-out \S+ of 10 images leaves a split without "):
        split(coco_of(10), share)


def test_one_image_cannot_be_divided():
    with pytest.raises(ConfigError, match=r"^--hold-out 0\.5 of 1 images leaves a split without"):
        split(coco_of(1), 0.5)
