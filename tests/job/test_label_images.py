# Copyright (c) the d2_memfit developers.
"""Datasets of label images and of segments: sizes, classes, and mappers that read them."""

import json

import cv2
import numpy as np
import pytest
import torch
from detectron2.data import (
    DatasetCatalog,
    MetadataCatalog,
    build_detection_train_loader,
    detection_utils,
)
from detectron2.data import transforms as T
from detectron2.data.datasets import load_sem_seg
from detectron2.engine import DefaultTrainer
from detectron2.structures import BitMasks, Instances

from d2_memfit import Job
from d2_memfit.config.load import load_cfg
from d2_memfit.job.datasets import statistics_of
from d2_memfit.job.mapper import tiles

IGNORED = 255


class SemanticTrainer(DefaultTrainer):
    """With a mapper that makes a mask of each class, as MaskFormer's does."""

    @classmethod
    def build_train_loader(cls, cfg):
        resize = T.ResizeShortestEdge(cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN, "choice")
        crop = T.RandomCrop_CategoryAreaConstraint("absolute", (64, 64), 0.75, IGNORED)
        augmentations = T.AugmentationList([resize, crop, T.RandomFlip()])

        def mapper(d):
            image = detection_utils.read_image(d["file_name"], "RGB")
            detection_utils.check_image_size(d, image)
            labels = detection_utils.read_image(d["sem_seg_file_name"]).astype("double")
            if "annotations" in d:
                raise ValueError("Semantic segmentation dataset should not have 'annotations'.")
            pixels = T.AugInput(image, sem_seg=labels)
            augmentations(pixels)
            labels = torch.as_tensor(pixels.sem_seg.astype("long"))
            classes = [c for c in labels.unique().tolist() if c != IGNORED]
            instances = Instances(tuple(labels.shape), gt_classes=torch.tensor(classes))
            instances.gt_masks = BitMasks(torch.stack([labels == c for c in classes]))
            pixels = torch.as_tensor(pixels.image.transpose(2, 0, 1).copy())
            return {"image": pixels, "sem_seg": labels, "instances": instances}

        return build_detection_train_loader(cfg, mapper=mapper)


class PanopticTrainer(DefaultTrainer):
    """With a mapper that makes a mask of each segment."""

    @classmethod
    def build_train_loader(cls, cfg):
        def mapper(d):
            if "annotations" in d:
                raise ValueError("Panoptic segmentation dataset should not have 'annotations'.")
            colors = detection_utils.read_image(d["pan_seg_file_name"], "RGB").astype(int)
            ids = torch.as_tensor(colors @ [1, 256, 256**2])
            masks = [ids == segment["id"] for segment in d["segments_info"]]
            assert all(mask.any() for mask in masks)
            instances = Instances(tuple(ids.shape), gt_masks=BitMasks(torch.stack(masks)))
            instances.gt_classes = torch.zeros(len(masks), dtype=torch.int64)
            image = detection_utils.read_image(d["file_name"], "RGB").transpose(2, 0, 1).copy()
            return {"image": torch.as_tensor(image), "instances": instances}

        return build_detection_train_loader(cfg, mapper=mapper)


def make_cfg(name, **keys):
    cfg = load_cfg("Base-RCNN-FPN")
    cfg.MODEL.DEVICE, cfg.MODEL.META_ARCHITECTURE = "cpu", "SemanticSegmentor"
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = (name,), ()
    cfg.SOLVER.IMS_PER_BATCH = 2
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (100,), 200
    for key, value in keys.items():
        cfg.merge_from_list([key.replace("__", "."), value])
    return cfg


@pytest.fixture
def drawn(tmp_path, catalogs):
    """Photographs and label images on disk, registered as projects do, without sizes."""
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    shapes, numbers = [(120, 90), (80, 160), (60, 60)], [2, 6, 3]
    for i, ((height, width), num) in enumerate(zip(shapes, numbers)):
        cv2.imwrite(str(tmp_path / f"images/{i}.jpg"), np.zeros((height, width, 3), np.uint8))
        labels = np.full((height, width), IGNORED, np.uint8)
        for k in range(num):
            cv2.circle(labels, (10 + 7 * k, 30), 3, 3 * k, -1)
        cv2.imwrite(str(tmp_path / f"labels/{i}.png"), labels)
    name = "drawn_sem_seg"
    folders = str(tmp_path / "labels"), str(tmp_path / "images")
    DatasetCatalog.register(name, lambda: load_sem_seg(*folders))
    metadata = MetadataCatalog.get(name)
    metadata.set(evaluator_type="sem_seg", ignore_label=IGNORED, stuff_classes=list("abcdefghij"))
    return name


def test_sizes_and_classes_are_read_from_the_files(drawn):
    statistics = statistics_of([drawn])
    assert statistics.sizes == {(120, 90), (80, 160), (60, 60)}
    assert statistics.labels == (0, 3, 6, 9, 12, 15)
    assert statistics.num_instances == 6
    assert statistics.mean_instances == pytest.approx(11 / 3)
    assert not statistics.is_guess


def test_a_mapper_of_label_images_gets_an_image_with_all_classes_that_one_has(drawn):
    job = Job.from_trainer(SemanticTrainer, make_cfg(drawn), 1)
    batch = job.training_batch(2)
    assert [tuple(d["image"].shape) for d in batch] == [(3, 64, 64)] * 2
    most, second = (d["instances"].gt_classes.tolist() for d in batch)
    assert (most, second) == ([0, 3, 6, 9, 12, 15], [0, 3, 6])  # as the images with most classes
    assert job.batches.num_instances == 6
    assert job.batches.assumptions == ()
    assert job.batches.typical.num_instances == 4  # the mean of 6, 3 and 2
    told = Job.from_trainer(SemanticTrainer, make_cfg(drawn), 1, num_instances=8)
    assert len(told.training_batch(1)[0]["instances"]) == 8


def test_a_file_that_is_missing_makes_a_dataset_a_missing_one(drawn, tmp_path):
    (tmp_path / "labels/1.png").unlink()
    (tmp_path / "images/1.jpg").unlink()
    assert statistics_of([drawn]).num_instances == 3
    DatasetCatalog.remove(drawn)
    gone = [{"file_name": "gone.jpg", "sem_seg_file_name": "gone.png"}]
    DatasetCatalog.register(drawn, lambda: gone)
    assert statistics_of([drawn]) is None
    job = Job.from_trainer(SemanticTrainer, make_cfg(drawn), 1)
    assert len(job.training_batch(1)[0]["instances"]) == 10  # the metadata's classes
    assert "with 10 of 10 classes in each label image" in job.batches.assumptions[0]
    assert job.batches.is_guess
    assert job.batches.typical is None  # an image may have as many as in the mean


@pytest.mark.parametrize(
    ("name", "num"), [("ade20k_sem_seg_train", 42), ("cityscapes_fine_sem_seg_train", 19)]
)
def test_missing_label_images_have_the_classes_of_the_dataset_by_its_name(name, num):
    job = Job.from_trainer(SemanticTrainer, make_cfg(name), 1)
    (image,) = job.training_batch(1)
    assert len(image["instances"]) == job.batches.num_instances == num
    assert "a guess (ADE20K has 10.5 in the mean" in job.batches.assumptions[0]
    assert job.batches.is_guess
    assert len(job.batches.typical.training(1)[0]["instances"]) == 10


@pytest.fixture
def panoptic(tmp_path, catalogs):
    """One photograph with four segments, in the form of COCO's panoptic files, without sizes."""
    cv2.imwrite(str(tmp_path / "0.jpg"), np.zeros((90, 130, 3), np.uint8))
    segment = {"category_id": 0, "iscrowd": 0, "isthing": True}
    d = {"file_name": str(tmp_path / "0.jpg"), "pan_seg_file_name": str(tmp_path / "0.png")}
    d["segments_info"] = [{"id": 1000 + 300 * i, **segment} for i in range(4)]
    (tmp_path / "panoptic.json").write_text(json.dumps({}))
    DatasetCatalog.register("drawn_panoptic", lambda: [d])
    # The file of the instances is elsewhere, and not needed.
    files = {"panoptic_json": str(tmp_path / "panoptic.json"), "json_file": "gone.json"}
    MetadataCatalog.get("drawn_panoptic").set(**files)
    return "drawn_panoptic"


@pytest.mark.parametrize("told", [None, 7])
def test_a_panoptic_mapper_gets_the_segments_of_the_most_crowded_image(panoptic, told):
    job = Job.from_trainer(PanopticTrainer, make_cfg(panoptic), 1, num_instances=told)
    (image,) = job.training_batch(1)
    assert tuple(image["image"].shape) == (3, 90, 130)
    assert len(image["instances"]) == job.batches.num_instances == (told or 4)
    assert job.batches.assumptions == ()


def test_a_dataset_with_annotations_and_label_images_keeps_both():
    cfg = make_cfg("coco_2017_train_panoptic_separated")
    cfg.MODEL.MASK_ON = True
    (image,) = Job.from_cfg(cfg, 1).training_batch(1)
    assert len(image["instances"]) == 100
    assert image["sem_seg"].shape == image["image"].shape[1:]


@pytest.mark.parametrize("num", [19, 300])
def test_each_crop_of_tiles_has_all_values(num):
    image = tiles((512, 700), range(num))
    assert image.shape == (512, 700)
    assert image.dtype == (np.uint8 if num < 257 else np.uint16)
    for top, left in [(0, 0), (17, 130), (256, 500)]:
        crop = image[top : top + 256, left : left + 200]
        assert set(np.unique(crop)) == set(range(num))
    colors = tiles((50, 60), [[1, 2, 3], [4, 5, 6]])
    assert colors.shape == (50, 60, 3)
    assert np.unique(colors.reshape(-1, 3), axis=0).tolist() == [[1, 2, 3], [4, 5, 6]]
