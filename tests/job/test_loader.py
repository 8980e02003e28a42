# Copyright (c) the d2_memfit developers.
"""Training with registered datasets, of which nothing was checked: what is said."""

import copy
import pickle

import pytest
from detectron2.data import (
    DatasetCatalog,
    DatasetMapper,
    MetadataCatalog,
    build_detection_test_loader,
    build_detection_train_loader,
)
from PIL import Image
from tiny import tiny_cfg

from d2_memfit import MemfitTrainer
from d2_memfit.common.errors import DataError
from d2_memfit.job import checked_loader, checked_test_loaders

NAME = "registered"


@pytest.fixture
def dicts(coins, catalogs):
    """Those of a dataset that is registered by a function, as projects do. They may be changed."""
    dicts = copy.deepcopy(DatasetCatalog.get("coins_val")[:4])
    DatasetCatalog.register(NAME, lambda: copy.deepcopy(dicts))
    MetadataCatalog.get(NAME).thing_classes = ["coin"]
    return dicts


@pytest.fixture
def cfg(tmp_path):
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = (NAME,), ()
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.SOLVER.MAX_ITER = 1
    cfg.OUTPUT_DIR = str(tmp_path / "output")
    return cfg


def warnings(log):
    return [r.getMessage() for r in log.records if r.levelname == "WARNING"]


def test_a_trainer_warns_before_the_first_iteration(cfg, dicts, log):
    for entry in dicts:
        entry["annotations"][0]["bbox"][2] = float("nan")
        entry["annotations"][1]["category_id"] = 1
    MetadataCatalog.pop(NAME)
    MetadataCatalog.get(NAME).thing_classes = ["coin", "note"]
    MemfitTrainer(cfg)
    said = warnings(log)
    assert any("4 of " in w and "boxes have a NaN, an infinity or no area" in w for w in said)
    assert any("4 of " in w and "category_id outside 0 to 0 (1)" in w for w in said)
    assert any("NUM_CLASSES is 1, but the dataset has 2 classes (coin, note)" in w for w in said)


def test_the_batches_are_those_of_an_unchecked_loader(cfg, dicts):
    from detectron2.utils.env import seed_all_rng

    found = []
    for build in (build_detection_train_loader, checked_loader(build_detection_train_loader, cfg)):
        seed_all_rng(1)
        found.append([d["image"].sum().item() for d in next(iter(build(cfg)))])
    assert found[0] == found[1]


def test_a_polygon_that_would_take_all_memory_is_an_error(cfg, dicts):
    dicts[0]["annotations"][0]["segmentation"][0][0] = float("nan")
    with pytest.raises(DataError, match=r"1 of \d+ objects have a polygon .*0\.png|jpg"):
        checked_loader(build_detection_train_loader, cfg)(cfg)
    with (
        checked_test_loaders(cfg),
        pytest.raises(DataError, match=r"1 of \d+ objects have a polygon"),
    ):
        build_detection_test_loader(cfg, NAME)


@pytest.mark.parametrize(("workers", "training"), [(0, True), (0, False), (1, True)])
def test_an_image_that_cannot_be_loaded_is_named(cfg, dicts, tmp_path, workers, training):
    cfg.DATALOADER.NUM_WORKERS = workers
    bad = tmp_path / "truncated.png"
    Image.open(dicts[0]["file_name"]).save(bad)
    bad.write_bytes(bad.read_bytes()[:-2000])
    for entry in dicts:
        entry["file_name"] = str(bad)
    if training:
        loader = checked_loader(build_detection_train_loader, cfg)(cfg)
    else:
        with checked_test_loaders(cfg):
            loader = build_detection_test_loader(cfg, NAME)
    with pytest.raises(DataError, match=r"the image .*truncated\.png cannot be loaded, .*OSError"):
        next(iter(loader))


def test_attributes_of_a_mapper_are_seen_in_the_dataset_also_in_a_worker(cfg, dicts):
    mapper = DatasetMapper(cfg, is_train=False)
    mapper.own = 7
    with checked_test_loaders(cfg):
        dataset = build_detection_test_loader(cfg, NAME, mapper=mapper).dataset
    for seen in (dataset, pickle.loads(pickle.dumps(dataset))):
        assert seen._map_func.own == 7
        assert not hasattr(seen._map_func, "another")


def test_images_to_evaluate_on_without_annotations_are_told_before_an_ap_of_nan(cfg, dicts, log):
    for image in dicts:
        image["annotations"] = []
    with checked_test_loaders(cfg):
        build_detection_test_loader(cfg, NAME)
    (warning,) = warnings(log)
    assert "images to evaluate on has an annotation" in warning


def bad_data_on_rank(rank, output_dir):
    annotation = {"bbox": [1, 1, 2, 2], "bbox_mode": 1, "category_id": 0}
    annotation["segmentation"] = [[float("nan")] * 6]
    entry = {"file_name": "a", "height": 9, "width": 9, "annotations": [annotation]}
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    cfg.OUTPUT_DIR = output_dir
    build = checked_loader(
        lambda: build_detection_train_loader([entry], mapper=lambda d: d, total_batch_size=2), cfg
    )
    with pytest.raises(DataError, match="have a polygon with a corner that is NaN"):
        build()


def test_each_rank_finds_the_error_itself(two_ranks, tmp_path):
    two_ranks.run(bad_data_on_rank, str(tmp_path))
