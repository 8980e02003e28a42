import json

import pytest
from detectron2.data import DatasetCatalog

from d2_memfit import get_cfg
from d2_memfit.data import check_coco_file, check_datasets, register_coco
from d2_memfit.errors import ConfigError, DataError


def cfg_with(train=(), test=()):
    cfg = get_cfg()
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = train, test
    return cfg


def test_coins_are_fine(coins):
    check_datasets(cfg_with(("coins_train",), ("coins_val",)))
    for split in ("train", "val"):
        check_coco_file(f"coins_{split}", str(coins / f"{split}.json"), str(coins / split), True)


def test_the_same_dataset_may_be_registered_twice_and_another_may_not_take_its_name(coins):
    register_coco("coins_train", str(coins / "train.json"), str(coins / "train"))
    assert len(DatasetCatalog.get("coins_train")) == 64
    with pytest.raises(ConfigError, match="--coco coins_train: there is another dataset"):
        register_coco("coins_train", str(coins / "val.json"), str(coins / "val"))


def test_a_name_that_is_not_registered_is_answered_with_near_ones(coins):
    with pytest.raises(
        ConfigError, match=r"DATASETS\.TRAIN names 'coins_trian'.*near: coins_train"
    ):
        check_datasets(cfg_with(("coins_trian",)))


def test_there_must_be_something_to_train_on():
    with pytest.raises(ConfigError, match=r"DATASETS\.TRAIN is empty"):
        check_datasets(cfg_with())
    check_datasets(cfg_with(), eval_only=True)


def test_a_builtin_dataset_that_is_not_on_disk_is_named():
    with pytest.raises(DataError, match=r"instances_train2017\.json does not exist"):
        check_datasets(cfg_with(("coco_2017_train",)))


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
        (crowd_only, "empty: .* no annotations but those of crowds"),
        (drop_from_first("images", "id"), "'images' .* has an entry without id"),
        (drop_from_first("annotations", "bbox"), "'annotations' .* has an entry without bbox"),
        (set_in_first("annotations", "category_id", 9), "category_id 9, and there is nothing"),
        (set_in_first("annotations", "image_id", 999), "image_id 999, and there is nothing"),
        (set_in_first("annotations", "id", 2), "'annotations' .* has the id 2 more than once"),
        (set_in_first("images", "file_name", "no.png"), r"first image .*no\.png does not exist"),
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
        (None, "cannot open"),
        ("", "not valid JSON"),
        ('{"images": [', "not valid JSON"),
        ("[]", "not COCO's format"),
    ],
)
def test_a_file_that_is_not_coco_is_named(tmp_path, content, message):
    file = tmp_path / "broken.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=message) as e:
        check_coco_file("broken", str(file), str(tmp_path), for_training=True)
    assert str(file) in str(e.value)


def test_a_dataset_to_evaluate_on_needs_no_annotations(coins, tmp_path):
    file = tmp_path / "image_info.json"
    coco = json.loads((coins / "val.json").read_text())
    del coco["annotations"]
    file.write_text(json.dumps(coco))
    check_coco_file("test", str(file), str(coins / "val"), for_training=False)
