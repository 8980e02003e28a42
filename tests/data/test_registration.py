# Copyright (c) the d2_memfit developers.
"""Datasets by their files, registered and found."""

import json

import pytest
from detectron2.data import DatasetCatalog
from detectron2.data.detection_utils import create_keypoint_hflip_indices

from d2_memfit import get_cfg
from d2_memfit.common.errors import ConfigError, DataError
from d2_memfit.data.registration import check_datasets, register_coco


def cfg_with(train=(), test=()):
    cfg = get_cfg()
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = train, test
    return cfg


def test_coins_are_there(coins):
    check_datasets(cfg_with(("coins_train",), ("coins_val",)))


def test_the_same_dataset_may_be_registered_twice_and_another_may_not_take_its_name(coins):
    register_coco("coins_train", str(coins / "train.json"), str(coins / "train"))
    assert len(DatasetCatalog.get("coins_train")) == 64
    with pytest.raises(ConfigError, match="--coco coins_train: there is another dataset"):
        register_coco("coins_train", str(coins / "val.json"), str(coins / "val"))


def test_a_name_that_is_not_registered_is_answered_with_near_ones(coins):
    with pytest.raises(
        ConfigError, match=r"TRAIN names 'coins_trian'.*did you mean coins_train.* names 'others'"
    ):
        check_datasets(cfg_with(("coins_trian", "others")))


def test_there_must_be_something_to_train_on():
    with pytest.raises(ConfigError, match=r"DATASETS\.TRAIN is empty"):
        check_datasets(cfg_with())
    check_datasets(cfg_with(), eval_only=True)


def test_all_files_of_builtin_datasets_that_are_not_on_disk_are_named_at_once():
    with pytest.raises(DataError) as e:
        check_datasets(cfg_with(("coco_2017_train",), ("coco_2017_val_panoptic_separated",)))
    assert "DATASETS.TEST coco_2017_val_panoptic_separated: " in str(e.value)
    for file in ("instances_val2017.json", "panoptic_val2017.json", "instances_train2017.json"):
        assert file in str(e.value)


def test_keypoints_of_a_users_own_can_be_flipped(coins, tmp_path, catalogs):
    coco = json.loads((coins / "val.json").read_text())
    coco["categories"][0]["keypoints"] = ["left_edge", "middle", "right_edge"]
    for a in coco["annotations"]:
        a["keypoints"] = [1, 1, 2, 5, 5, 2, 9, 9, 2]
    file = tmp_path / "keypoints.json"
    file.write_text(json.dumps(coco))
    register_coco("coins_with_keypoints", str(file), str(coins / "val"))
    assert DatasetCatalog.get("coins_with_keypoints")[0]["annotations"][0]["keypoints"]
    assert list(create_keypoint_hflip_indices(["coins_with_keypoints"])) == [2, 1, 0]
