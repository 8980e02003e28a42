# Copyright (c) the d2_memfit developers.
"""What is in a COCO file, and files that cannot be trained on."""

import gc
import json
import time

import pytest

from d2_memfit.data.coco_file import check_coco_file
from d2_memfit.errors import DataError


def test_coins_are_fine(coins):
    for split, num_images in (("train", 64), ("val", 16)):
        json_file, folder = str(coins / f"{split}.json"), str(coins / split)
        file = check_coco_file(f"coins_{split}", json_file, folder, True)
        assert file.classes == ("coin",)
        summary = file.summary
        assert summary.num_images == summary.num_images_with_objects == num_images
        assert summary.num_objects > num_images
        assert set(summary.cases) == {"no_keypoints"}
        assert summary.cases["no_keypoints"].number == summary.num_objects


def test_classes_are_in_the_order_of_detectron2(coins, tmp_path):
    coco = json.loads((coins / "val.json").read_text())
    coco["categories"] = [{"id": 7, "name": "note"}, {"id": 1, "name": "coin"}]
    coco["annotations"][0].update(segmentation={"size": [1, 1], "counts": "0"}, id=1000)
    del coco["annotations"][1]["segmentation"]
    coco["annotations"][2]["iscrowd"] = 1
    file = tmp_path / "other.json"
    file.write_text(json.dumps(coco))
    found = check_coco_file("other", str(file), None, True)
    assert found.classes == ("coin", "note")
    assert found.summary.num_objects == len(coco["annotations"]) - 1
    (code,) = found.summary.cases["rle_size"].examples
    assert code.startswith("id 1000 of ")
    (without,) = found.summary.cases["no_mask"].examples
    assert without.startswith(f"id {coco['annotations'][1]['id']} of ")


def many(num_annotations, num_images=1000):
    return {
        "images": [
            {"id": i, "file_name": f"{i}.jpg", "height": 480, "width": 640}
            for i in range(num_images)
        ],
        "annotations": [
            {
                "id": i,
                "image_id": i % num_images,
                "category_id": 1,
                "bbox": [0, 0, 9, 9],
                "segmentation": [[float(x) for x in range(40)]],
            }
            for i in range(num_annotations)
        ],
        "categories": [{"id": 1, "name": "thing"}],
    }


def cpu_seconds(coco, tmp_path):
    file = tmp_path / "many.json"
    file.write_text(json.dumps(coco))
    start = time.process_time()
    with pytest.raises(DataError, match="has the id 7 more than once"):
        check_coco_file("many", str(file), None, for_training=True)
    return time.process_time() - start


@pytest.mark.slow
def test_the_time_grows_with_the_annotations_and_not_with_their_square(tmp_path):
    """60,000 took over 195 s, of which the last is there twice. The bound is that of the CPU's
    time, and ten times what it takes.
    """
    coco = many(60_000)
    coco["annotations"][-1]["id"] = 7
    assert cpu_seconds(coco, tmp_path) < 5


@pytest.mark.exhaustive
def test_as_many_annotations_as_coco_has_are_checked_in_less_time_than_they_are_read(tmp_path):
    """In seconds of CPU, of which reading takes 8 on a slow machine."""
    file = tmp_path / "coco.json"
    file.write_text(json.dumps(many(860_000, 118_000)))
    gc.collect()
    gc.disable()  # it would take as long again
    start = time.process_time()
    with file.open() as f:
        json.load(f)
    reading = time.process_time() - start
    gc.enable()
    lines = []
    start = time.process_time()
    found = check_coco_file("coco", str(file), None, for_training=True, progress=lines.append)
    assert time.process_time() - start < 2 * reading
    assert found.summary.num_objects == 860_000
    (line,) = lines
    assert line.startswith(f"Reading {file}, ")


def crowd_only(coco):
    for a in coco["annotations"]:
        a["iscrowd"] = 1


def set_in_first(key, field, value):
    def change(coco):
        coco[key][0][field] = value

    return change


def drop_from_first(key, field):
    return lambda coco: coco[key][0].pop(field)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda coco: coco.update(images=[]), "empty: the list 'images'"),
        (lambda coco: coco.update(images=["a"]), "'images' .* has an entry without file_name"),
        (lambda coco: coco.pop("images"), "'images' .* is missing"),
        (lambda coco: coco.pop("annotations"), "'annotations' .* is missing"),
        (lambda coco: coco.update(annotations=[]), "empty: .* no annotations"),
        (crowd_only, "empty: .* no annotations, except of crowds"),
        (drop_from_first("images", "id"), "'images' .* has an entry without id"),
        (drop_from_first("annotations", "bbox"), "'annotations' .* has an entry without bbox"),
        (set_in_first("annotations", "category_id", 9), "category_id 9, but nothing has that id"),
        (set_in_first("annotations", "image_id", 999), "image_id 999, but nothing has that id"),
        (set_in_first("annotations", "category_id", [1]), r"category_id \[1\], which is not an"),
        (set_in_first("images", "id", {"a": 1}), r"'images' .* has the id {'a': 1}, which is no"),
        (set_in_first("annotations", "id", 2), "'annotations' .* has the id 2 more than once"),
        (
            set_in_first("images", "file_name", "no.png"),
            r"1 of \d+ images do not exist.*no\.png",
        ),
        (
            set_in_first("images", "height", 5),
            r"has \(\d+, \d+\) pixels of .* entry says \(\d+, 5\)",
        ),
        (set_in_first("images", "width", None), r"width None with the id 0, which is not a number"),
        (set_in_first("annotations", "bbox", None), r"the bbox None with the id 1, which is not"),
        (set_in_first("annotations", "bbox", [1, 2, 3]), r"the bbox \[1, 2, 3\] with the id 1,"),
        (set_in_first("annotations", "bbox", [1, 2, 3, float("nan")]), r"nan\] with the id 1,"),
        (set_in_first("annotations", "bbox", [10**400, 1, 1, 1]), r"the bbox \[1000"),
        (set_in_first("annotations", "bbox", [True, 1, 1, 1]), r"the bbox \[True, 1"),
        (set_in_first("annotations", "iscrowd", "0"), "iscrowd '0' with the id 1, which is not 0"),
        (set_in_first("annotations", "keypoints", [1, 2]), r"keypoints \[1, 2\] with the id 1, w"),
        (
            set_in_first("categories", "keypoints", "abc"),
            "the keypoints 'abc' with the id 1, which",
        ),
        (set_in_first("categories", "name", 7), "has the name 7 with the id 1, which is not a te"),
        (set_in_first("images", "file_name", None), "file_name None with the id 0, which is not"),
        (set_in_first("images", "height", float("nan")), "has the height nan with the id 0, which"),
        (set_in_first("images", "height", -24), "has the height -24 with the id 0, which is not"),
        (set_in_first("images", "id", 1.5), "has the id 1.5, which is not an integer or a text"),
        (
            lambda coco: coco["categories"].append({"id": "x", "name": "note"}),
            "has numbers and texts as id: use one type for all",
        ),
    ],
)
def test_a_coco_file_that_cannot_be_trained_on_is_explained(coins, tmp_path, change, message):
    file = tmp_path / "broken.json"
    coco = json.loads((coins / "val.json").read_text())
    change(coco)
    file.write_text(json.dumps(coco))
    with pytest.raises(DataError, match=message) as e:
        check_coco_file("broken", str(file), str(coins / "val"), for_training=True)
    assert "dataset broken" in str(e.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"cannot be read \(No such file"),
        ("", "not valid JSON"),
        ('{"images": [', "not valid JSON"),
        ("[]", "not in COCO's format"),
    ],
)
def test_a_file_that_is_not_coco_is_named(tmp_path, content, message):
    file = tmp_path / "broken.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=message) as e:
        check_coco_file("broken", str(file), str(tmp_path), for_training=True)
    assert str(file) in str(e.value)


def test_masks_of_crowds_are_looked_at_too(coins, tmp_path):
    """An evaluation draws them."""
    coco = json.loads((coins / "val.json").read_text())
    coco["annotations"][0].update(
        iscrowd=1, segmentation={"size": [1, 1], "counts": [7]}, bbox=[0] * 4
    )
    file = tmp_path / "crowd.json"
    file.write_text(json.dumps(coco))
    cases = check_coco_file("crowd", str(file), None, True).summary.cases
    assert cases["bad_rle"].number == 1
    assert set(cases) == {"bad_rle", "no_keypoints"}


def test_a_dataset_to_evaluate_on_needs_no_annotations(coins, tmp_path):
    file = tmp_path / "image_info.json"
    coco = json.loads((coins / "val.json").read_text())
    del coco["annotations"]
    file.write_text(json.dumps(coco))
    check_coco_file("test", str(file), str(coins / "val"), for_training=False)
