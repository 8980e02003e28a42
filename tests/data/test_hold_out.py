# Copyright (c) the d2_memfit developers.
"""Images that are held out: as many as asked for, and the same each time."""

import json
import random
from pathlib import Path

import pytest
from small_datasets import coco_of

from d2_memfit.common.errors import ConfigError
from d2_memfit.data.hold_out import hold_out


def parts_of(folder, coco, share=0.2, output="output", resume=False):
    """Ids of the images in train.json and val.json, which have all annotations of these images."""
    file = folder / "all.json"
    file.write_text(json.dumps(coco))
    parts = hold_out([["coins", str(file), "images"]], share, str(folder / output), resume)
    assert [(name, images) for name, _, images in parts] == [
        ("coins_train", "images"),
        ("coins_val", "images"),
    ]
    contents = [json.loads(Path(file).read_text()) for _, file, _ in parts]
    ids = [{image["id"] for image in content["images"]} for content in contents]
    for content, images in zip(contents, ids):
        expected = [a for a in coco["annotations"] if a["image_id"] in images]
        assert content["annotations"] == expected
        assert content["categories"] == coco["categories"]
    return ids


@pytest.mark.parametrize(("number", "share"), [(18, 0.2), (100, 0.33)])
def test_the_parts_are_disjoint_and_complete(tmp_path, number, share):
    train, held = parts_of(tmp_path, coco_of(number), share)
    assert not train & held
    assert train | held == set(range(number))
    assert len(held) == int(number * share)


def test_the_same_images_are_held_out_whatever_their_order(tmp_path):
    coco = coco_of(40, lambda i: [i % 3])
    _, held = parts_of(tmp_path, coco)
    assert held != set(range(4, 40, 5))  # they are drawn
    for part in ("images", "annotations"):
        random.Random(1).shuffle(coco[part])
    assert parts_of(tmp_path, coco, output="again")[1] == held


def test_a_resume_takes_the_files_that_are_there(tmp_path):
    before = parts_of(tmp_path, coco_of(40))
    hold_out([["coins", "was_moved.json", "images"]], 0.5, str(tmp_path / "output"), True)
    assert parts_of(tmp_path, coco_of(40), resume=True) == before


def test_the_files_of_another_share_are_not_replaced(tmp_path):
    coco = coco_of(10)
    parts_of(tmp_path, coco)
    with pytest.raises(ConfigError, match=r"train\.json exists: move it, or name another"):
        parts_of(tmp_path, coco, 0.5)
    assert parts_of(tmp_path, coco)
    (tmp_path / "train.json").write_text(json.dumps(coco))
    with pytest.raises(ConfigError, match=r"train\.json is the file .*train\.json, which this"):
        hold_out([["coins", str(tmp_path / "train.json"), "images"]], 0.5, str(tmp_path), False)


@pytest.mark.parametrize("share", [0, 1, -0.2, 0.09, float("nan")])
def test_a_share_that_leaves_a_part_empty_is_refused(tmp_path, share):
    with pytest.raises(ConfigError, match=r"^--hold-out \S+ of 10 images leaves a part without "):
        parts_of(tmp_path, coco_of(10), share)
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize("number", [0, 2])
def test_another_number_of_datasets_is_refused(tmp_path, number):
    with pytest.raises(ConfigError, match=f"one dataset, but there are {number} --coco"):
        hold_out([["coins", "all.json", "images"]] * number, 0.2, str(tmp_path), False)
