# Copyright (c) the d2_memfit developers.
"""Estimates beside training steps of real images, with the model's own proposals."""

import cv2
import numpy as np
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_sem_seg
from tiny import tiny_cfg

from d2_memfit import Job, get_cfg
from d2_memfit.doctor.estimate_check import estimate_against_real_step, worst_real_images
from d2_memfit.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def coins_cfg(family):
    cfg = tiny_cfg(family)
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("coins_train",), ()
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (160,), 256
    cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 256
    cfg.MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION = 14  # most of the memory
    cfg.MODEL.RPN.POST_NMS_TOPK_TRAIN = 400
    cfg.SOLVER.IMS_PER_BATCH = 2
    return cfg


@pytest.mark.parametrize("family", ["faster_rcnn", "retinanet", "proposal_network"])
def test_an_estimate_is_the_memory_of_a_step_of_real_images(coins, family):
    cfg = coins_cfg(family)
    cfg.MODEL.WEIGHTS = "detectron2://ImageNetPretrained/MSRA/R-50.pkl"  # is not downloaded
    step = estimate_against_real_step(Job.from_cfg(cfg, 1))
    assert step.error == pytest.approx(0, abs=0.03)
    assert min(step.num_instances) > 1
    assert step.image_size[0] >= 160
    assert step.at_least == ()
    assert str(step).startswith(f"{step.estimated_bytes / 2**20:.1f} MB estimated, ")


def test_a_step_with_random_weights_needs_no_more_than_estimated(coins):
    """Its proposals are rarely on objects, so that few masks are predicted."""
    step = estimate_against_real_step(Job.from_cfg(coins_cfg("mask_rcnn"), 1))
    assert step.error > -0.01


@pytest.fixture
def stripes(tmp_path):
    """Label images on disk, without sizes in the dataset."""
    random = np.random.RandomState(0)
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    for i in range(4):
        image = random.randint(0, 255, (128, 160 + 16 * i, 3)).astype(np.uint8)
        cv2.imwrite(str(tmp_path / f"images/{i}.jpg"), image)
        labels = np.repeat(np.arange(128, dtype=np.uint8) // 16, image.shape[1]).reshape(128, -1)
        cv2.imwrite(str(tmp_path / f"labels/{i}.png"), labels)
    name = "stripes_sem_seg"
    DatasetCatalog.register(
        name, lambda: load_sem_seg(str(tmp_path / "labels"), str(tmp_path / "images"))
    )
    metadata = MetadataCatalog.get(name)
    metadata.set(evaluator_type="sem_seg", ignore_label=255, stuff_classes=list("abcdefgh"))
    yield name
    DatasetCatalog.remove(name)
    MetadataCatalog.remove(name)


def test_a_job_of_label_images_is_compared_too(stripes):
    cfg = get_cfg()
    cfg.MODEL.DEVICE, cfg.MODEL.META_ARCHITECTURE = "cpu", "SemanticSegmentor"
    cfg.MODEL.BACKBONE.NAME, cfg.MODEL.RESNETS.DEPTH = "build_resnet_fpn_backbone", 18
    cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 64
    cfg.MODEL.RESNETS.OUT_FEATURES = cfg.MODEL.FPN.IN_FEATURES = ["res2", "res3", "res4", "res5"]
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST, cfg.SOLVER.IMS_PER_BATCH = (stripes,), (), 2
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (128,), 256
    step = estimate_against_real_step(Job.from_cfg(cfg, 1))
    assert step.image_size == (128, 208)
    assert step.error == pytest.approx(0, abs=0.02)


def test_the_images_are_the_largest_and_the_most_crowded(coins):
    cfg = coins_cfg("mask_rcnn")
    images = worst_real_images(Job.from_cfg(cfg, 1).parts, 3)
    all_images = [len(d["annotations"]) for d in DatasetCatalog.get("coins_train")]
    assert len(images) == 3
    assert max(len(d["instances"]) for d in images) == max(all_images)
    assert all(d["image"].float().std() > 1 for d in images)  # photographs


def test_without_a_dataset_there_is_nothing_to_compare_with():
    cfg = coins_cfg("faster_rcnn")
    cfg.DATASETS.TRAIN = ("nobody_has_it",)
    with pytest.raises(ConfigError, match="the training dataset nobody_has_it cannot be read"):
        estimate_against_real_step(Job.from_cfg(cfg, 1))


def test_a_dataset_smaller_than_a_batch_is_an_error(coins):
    cfg = coins_cfg("faster_rcnn")
    cfg.SOLVER.IMS_PER_BATCH = 1000
    with pytest.raises(ConfigError, match=r"coins_train has \d+ images, and 1000 are needed"):
        estimate_against_real_step(Job.from_cfg(cfg, 1))
