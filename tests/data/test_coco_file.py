# Copyright (c) the d2_memfit developers.
"""What is in a COCO file, and files that cannot be trained on."""

import json

import pytest

from d2_memfit.common.errors import DataError
from d2_memfit.data.coco_file import check_coco_file


def test_classes_are_in_the_order_of_detectron2(coins, tmp_path):
    coco = json.loads((coins / "val.json").read_text())
    coco["categories"] = [{"id": 7, "name": "note"}, {"id": 1, "name": "coin"}]
    coco["annotations"][1]["id"] = 1000
    del coco["annotations"][1]["segmentation"]
    coco["annotations"][2]["iscrowd"] = 1
    file = tmp_path / "other.json"
    file.write_text(json.dumps(coco))
    found = check_coco_file("other", str(file), None, True)
    assert (found.classes, found.summary.num_images) == (("coin", "note"), 16)
    cases, number = found.summary.cases, len(coco["annotations"]) - 1
    assert set(cases) == {"no_keypoints", "no_mask"}
    assert cases["no_keypoints"].number == found.summary.num_objects == number
    (without,) = cases["no_mask"].examples
    assert without.startswith("id 1000 of ")


def set_in_first(key, field, value):
    def change(coco):
        coco[key][0][field] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda coco: coco.update(images=[]),
        lambda coco: [a.update(iscrowd=1) for a in coco["annotations"]],
        lambda coco: coco["images"][0].pop("id"),
        set_in_first("annotations", "category_id", 9),
        set_in_first("annotations", "id", 2),
        set_in_first("images", "file_name", "no.png"),
        set_in_first("images", "height", 5),
        set_in_first("annotations", "bbox", None),
        set_in_first("annotations", "bbox", [1, 2, 3, float("nan")]),
        set_in_first("categories", "name", 7),
        lambda coco: coco["categories"].append({"id": "x", "name": "note"}),
        lambda coco: [a.update(iscrowd=None) for a in coco["annotations"]],
    ],
    ids=range(12),
)
def test_a_coco_file_that_cannot_be_trained_on_is_explained(prose, coins, tmp_path, change):
    file = tmp_path / "broken.json"
    coco = json.loads((coins / "val.json").read_text())
    change(coco)
    file.write_text(json.dumps(coco))
    with pytest.raises(DataError, match="dataset broken") as e:
        check_coco_file("broken", str(file), str(coins / "val"), for_training=True)
    prose(str(e.value), coins=coins)


def test_a_dataset_to_evaluate_on_needs_no_annotations(coins, tmp_path):
    file = tmp_path / "image_info.json"
    coco = json.loads((coins / "val.json").read_text())
    del coco["annotations"]
    file.write_text(json.dumps(coco))
    check_coco_file("test", str(file), str(coins / "val"), for_training=False)
