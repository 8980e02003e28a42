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
        check_coco_file(f"coins_{split}", str(coins / f"{split}.json"), str(coins / split))


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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot open"),
        ("", "not valid JSON"),
        ('{"images": [', "not valid JSON"),
        ("[]", "no list 'images'"),
        ('{"images": []}', "empty: the list 'images'"),
        ("no annotations", "empty: the list 'annotations'"),
        ("wrong folder", r"first image .*000\.png does not exist"),
    ],
)
def test_a_coco_file_that_cannot_be_trained_on_is_explained(coins, tmp_path, content, message):
    file = tmp_path / "broken.json"
    coco = json.loads((coins / "val.json").read_text())
    if content == "no annotations":
        coco["annotations"] = []
    if content in ("no annotations", "wrong folder"):
        content = json.dumps(coco)
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=message) as e:
        check_coco_file("broken", str(file), str(tmp_path))
    assert "dataset broken" in str(e.value)
