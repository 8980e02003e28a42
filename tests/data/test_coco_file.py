# Copyright (c) the d2_memfit developers.
"""What is in a COCO file, and files that cannot be trained on."""

import json

import pytest

from d2_memfit.common.errors import DataError
from d2_memfit.data.coco_file import check_coco_file


def test_coins_are_fine(coins):
    file = check_coco_file("coins_val", str(coins / "val.json"), str(coins / "val"), True)
    summary = file.summary
    assert (file.classes, summary.num_images, set(summary.cases)) == (
        ("coin",),
        16,
        {"no_keypoints"},
    )
    assert summary.cases["no_keypoints"].number == summary.num_objects > 16


def test_classes_are_in_the_order_of_detectron2(coins, tmp_path):
    coco = json.loads((coins / "val.json").read_text())
    coco["categories"] = [{"id": 7, "name": "note"}, {"id": 1, "name": "coin"}]
    coco["annotations"][1]["id"] = 1000
    del coco["annotations"][1]["segmentation"]
    coco["annotations"][2]["iscrowd"] = 1
    file = tmp_path / "other.json"
    file.write_text(json.dumps(coco))
    found = check_coco_file("other", str(file), None, True)
    assert found.classes == ("coin", "note")
    assert found.summary.num_objects == len(coco["annotations"]) - 1
    (without,) = found.summary.cases["no_mask"].examples
    assert without.startswith("id 1000 of ")


def crowd_only(coco):
    for a in coco["annotations"]:
        a["iscrowd"] = 1


def set_in_first(key, field, value):
    def change(coco):
        coco[key][0][field] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda coco: coco.update(images=[]), "empty: the list 'images'"),
        (crowd_only, "empty: .* no annotations, except of crowds"),
        (lambda coco: coco["images"][0].pop("id"), "'images' .* has an entry without id"),
        (set_in_first("annotations", "category_id", 9), "category_id 9, but nothing has that id"),
        (set_in_first("annotations", "id", 2), "'annotations' .* has the id 2 more than once"),
        (set_in_first("images", "file_name", "no.png"), r"1 of \d+ images do not exist"),
        (set_in_first("images", "height", 5), r"entry says \(\d+, 5\)"),
        (set_in_first("annotations", "bbox", None), r"the bbox None with the id 1, which is not"),
        (set_in_first("annotations", "bbox", [1, 2, 3, float("nan")]), r"nan\] with the id 1,"),
        (set_in_first("categories", "name", 7), "has the name 7 with the id 1, which is not a te"),
        (lambda coco: coco["categories"].append({"id": "x", "name": "note"}), "use one type"),
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


def test_a_dataset_to_evaluate_on_needs_no_annotations(coins, tmp_path):
    file = tmp_path / "image_info.json"
    coco = json.loads((coins / "val.json").read_text())
    del coco["annotations"]
    file.write_text(json.dumps(coco))
    check_coco_file("test", str(file), str(coins / "val"), for_training=False)
