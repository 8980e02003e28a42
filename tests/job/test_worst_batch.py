# Copyright (c) the d2_memfit developers.
"""The largest batches that a job's mapper makes, with and without datasets."""

import os

import cv2
import numpy as np
import pytest
import torch
from detectron2.data import DatasetCatalog, DatasetMapper, build_detection_train_loader
from detectron2.data.samplers import TrainingSampler
from detectron2.data.transforms import AugInput, Augmentation, ResizeTransform
from PIL import Image

from d2_memfit import Job, get_cfg
from d2_memfit.common.errors import ConfigError
from d2_memfit.job import tensors_of
from d2_memfit.job.datasets import assumed_statistics

# Images of a tenth of the usual size, where it does not matter.
SMALL = {
    "INPUT__MIN_SIZE_TRAIN": (80,),
    "INPUT__MAX_SIZE_TRAIN": 133,
    "INPUT__MIN_SIZE_TEST": 80,
    "INPUT__MAX_SIZE_TEST": 133,
}


def make_cfg(**keys):
    cfg = get_cfg()
    cfg.MODEL.DEVICE = "cpu"
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("nobody_has_it",), ()
    cfg.merge_from_list([x for k, v in keys.items() for x in (k.replace("__", "."), v)])
    return cfg


def sizes(cfg, num_images):
    return [tuple(d["image"].shape[1:]) for d in Job.from_cfg(cfg, 1).training_batch(num_images)]


def dicts_of(*images):
    """Dataset dicts of heights, widths and objects, which are crowds or not."""
    return [
        {"height": height, "width": width, "annotations": [{"iscrowd": c} for c in crowds]}
        for height, width, crowds in images
    ]


@pytest.fixture
def dataset(catalogs):
    """A landscape, a portrait with many objects, and a crowd, which does not count."""
    images = (480, 640, [0] * 3), (1000, 500, [0] * 7), (600, 600, [1] * 50)
    DatasetCatalog.register("worst_case_test", lambda: dicts_of(*images))
    return "worst_case_test"


def test_without_a_dataset_images_have_any_shape_and_100_instances_and_it_is_said():
    cfg = make_cfg(DATASETS__TRAIN=("nobody_has_it",), INPUT__MIN_SIZE_TRAIN=(640, 800))
    batches = Job.from_cfg(cfg, 1).batches
    assert sorted(sizes(cfg, 1)[0]) == [800, 1333]
    assert batches.num_instances == 100
    assert "nobody_has_it" in batches.assumptions[0]


@pytest.mark.parametrize(
    ("name", "num", "is_guess"),
    [
        ("coco_2017_train", 100, False),
        ("keypoints_coco_2017_train", 100, False),
        ("lvis_v1_train", 775, True),
        ("cityscapes_fine_instance_seg_train", 170, True),
        ("nobody_has_it", 100, True),
    ],
)
def test_datasets_are_known_by_name_and_guesses_are_said(name, num, is_guess):
    statistics = assumed_statistics([name])
    assert (statistics.num_instances, statistics.is_guess) == (num, is_guess)
    assert ("a guess" in statistics.missing) == is_guess
    told = statistics.with_instances(30)
    assert (told.num_instances, told.is_guess) == (30, False)


def test_where_all_images_of_a_dataset_have_one_size_it_is_taken():
    cfg = make_cfg(DATASETS__TRAIN=("cityscapes_fine_instance_seg_train",))
    cfg.DATASETS.TEST = ("cityscapes_fine_instance_seg_val",)
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (800, 1024), 2048
    assert sizes(cfg, 2) == [(1024, 2048), (1024, 2048)]
    (image,) = Job.from_cfg(cfg, 1).batches.evaluation()
    assert (image["height"], image["width"]) == (1024, 2048)
    told = Job.from_cfg(cfg, 1, num_instances=30)  # by the job's own mapper
    assert tuple(told.training_batch(1)[0]["image"].shape[1:]) == (1024, 2048)
    cfg.INPUT.MIN_SIZE_TRAIN = (0,)
    assert sizes(cfg, 1) == [(1024, 2048)]


def test_a_dataset_says_how_large_and_how_crowded_its_images_are(dataset):
    cfg = make_cfg(DATASETS__TRAIN=(dataset,), DATASETS__TEST=(dataset,))
    job = Job.from_cfg(cfg, 1)
    # The portrait, which INPUT.MAX_SIZE_TRAIN limits, beside the square; the landscape meets none.
    assert sizes(cfg, 2) == [(1333, 667), (800, 800)]
    assert sizes(cfg, 1) == [(1333, 667)]
    assert job.batches.num_instances == 7
    # The most crowded images, each once; the crowd is none, so the third one is of the next epoch.
    assert [len(d["instances"]) for d in job.training_batch(3)] == [7, 3, 7]
    assert [len(d["instances"]) for d in job.training_batch(3, job.batches.typical)] == [5] * 3
    (image,) = job.batches.evaluation()
    assert (image["height"], image["width"]) == (1000, 500)
    assert "instances" not in image
    assert job.batches.assumptions == job.batches.evaluation_assumptions == ()


def test_without_grouping_both_orientations_meet_in_a_batch(dataset):
    cfg = make_cfg(DATASETS__TRAIN=(dataset,), DATALOADER__ASPECT_RATIO_GROUPING=False)
    highest, widest, again = sizes(cfg, 3)
    assert (highest[0], widest[1]) == (1333, 1067)
    assert again == highest


@pytest.fixture
def panorama(catalogs):
    """Beside an ordinary landscape, and a narrow portrait."""
    images = (480, 640, [0]), (300, 900, [0]), (900, 270, [0])
    DatasetCatalog.register("panorama_test", lambda: dicts_of(*images))
    return "panorama_test"


def test_a_micro_batch_of_one_has_the_largest_single_image(panorama):
    cfg = make_cfg(DATASETS__TRAIN=(panorama,), DATALOADER__ASPECT_RATIO_GROUPING=False)
    assert sizes(cfg, 2) == [(1333, 400), (444, 1333)]
    assert sizes(cfg, 1) == [(800, 1067)]


def test_groups_meet_in_micro_batches_of_several_batches(panorama):
    keys = {"SOLVER__IMS_PER_BATCH": 4, "SOLVER__ACCUMULATION_STEPS": 2}
    apart = make_cfg(DATASETS__TRAIN=(panorama,), MEMFIT__MICRO_BATCH=2, **keys)
    assert sizes(apart, 2) == [(800, 1067), (444, 1333)]
    together = make_cfg(DATASETS__TRAIN=(panorama,), MEMFIT__MICRO_BATCH=3, **keys)
    assert sizes(together, 2) == [(1333, 400), (444, 1333)]


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [
        ("absolute", [300, 300], (800, 800)),
        ("relative", [0.5, 0.5], (1333, 667)),
        ("relative_range", [0.5, 0.5], (1333, 800)),
        ("absolute_range", [200, 400], (1333, 800)),
    ],
)
def test_crops_come_before_resizing(dataset, kind, size, expected):
    cfg = make_cfg(DATASETS__TRAIN=(dataset,))
    cfg.INPUT.CROP.ENABLED, cfg.INPUT.CROP.TYPE, cfg.INPUT.CROP.SIZE = True, kind, size
    (found,) = sizes(cfg, 1)
    assert sorted(found) == pytest.approx(sorted(expected), abs=16)


@pytest.fixture
def mapped(monkeypatch):
    """Pairs of a dict that Detectron2's mapper was given, and what it made of it."""
    pairs, call = [], DatasetMapper.__call__

    def noted(self, d):
        pairs.append((d, call(self, d)))
        return pairs[-1][1]

    monkeypatch.setattr(DatasetMapper, "__call__", noted)
    return pairs


def test_where_crops_have_any_size_the_largest_of_200_is_taken_and_that_is_said(dataset, mapped):
    cfg = make_cfg(DATASETS__TRAIN=(dataset,))
    assert Job.from_cfg(cfg, 1).batches.at_least == ()
    assert len(mapped) < 20
    mapped.clear()
    cfg.INPUT.CROP.ENABLED, cfg.INPUT.CROP.TYPE = True, "relative_range"
    job = Job.from_cfg(cfg, 1)
    assert job.batches.at_least == (
        "augmentations draw the sizes of images: the largest of 200 is taken",
    )
    assert len(mapped) == 201  # the first tells the lengths of the resize
    most = max(d["image"][0].nelement() for _, d in mapped[1:])
    (image,) = job.training_batch(1)
    assert image["image"][0].nelement() > 0.95 * most  # padded to a multiple of 32 pixels
    again = Job.from_cfg(cfg, 1).training_batch(1)
    assert again[0]["image"].shape == image["image"].shape


def test_images_in_their_own_size_need_a_dataset_or_their_size(dataset):
    cfg = make_cfg(INPUT__MIN_SIZE_TRAIN=(0,), DATASETS__TRAIN=("nobody_has_it",))
    with pytest.raises(ConfigError, match="leaves images in their own sizes"):
        sizes(cfg, 1)
    job = Job.from_cfg(cfg, 1, image_size=(700, 900), num_instances=9)
    (image,) = job.training_batch(1)
    assert (image["image"].shape, len(image["instances"])) == ((3, 700, 900), 9)
    cfg.DATASETS.TRAIN = (dataset,)
    assert sizes(cfg, 2) == [(1000, 500), (600, 600)]


def test_a_batch_has_what_the_models_ask_for():
    cfg = make_cfg(**SMALL)
    cfg.MODEL.MASK_ON = cfg.MODEL.KEYPOINT_ON = cfg.MODEL.LOAD_PROPOSALS = True
    cfg.INPUT.MASK_FORMAT = "bitmask"
    cfg.MODEL.META_ARCHITECTURE = "PanopticFPN"
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ("keypoints_coco_2017_train",)
    cfg.DATASETS.PROPOSAL_FILES_TRAIN = cfg.DATASETS.PROPOSAL_FILES_TEST = ("nor_this.pkl",)
    job = Job.from_cfg(cfg, 1)
    (image,) = job.training_batch(1)
    assert len(image["instances"]) == 100
    assert image["instances"].gt_masks.tensor.shape == (100, *image["image"].shape[1:])
    assert image["sem_seg"].shape == image["image"].shape[1:]
    assert len(image["proposals"]) == cfg.DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TRAIN
    assert sum(t.nbytes for t in tensors_of([image])) > 100 * 80 * 133
    (image,) = job.batches.evaluation()
    assert "instances" not in image
    assert len(image["proposals"]) == cfg.DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TEST


def test_the_datasets_own_annotations_are_repeated_for_more_instances(catalogs):
    info = {"file_name": "a.jpg", "image_id": 1, "height": 30, "width": 40}
    own = {"bbox": [1, 2, 5, 6], "bbox_mode": 0, "category_id": 3}
    DatasetCatalog.register("own_annotations", lambda: [{**info, "annotations": [own]}])
    cfg = make_cfg(DATASETS__TRAIN=("own_annotations",))
    (image,) = Job.from_cfg(cfg, 1, num_instances=5).training_batch(1)
    assert image["instances"].gt_classes.tolist() == [3] * 5


@pytest.mark.parametrize("crops", [False, True])
def test_a_crowded_image_is_mapped_once_if_no_object_is_lost(crops, mapped):
    cfg = make_cfg()
    cfg.INPUT.CROP.ENABLED, cfg.INPUT.CROP.TYPE = crops, "absolute_range"
    cfg.INPUT.CROP.SIZE = [300, 600]
    assert len(sizes(cfg, 2)) == 2
    crowded = [d for d, _ in mapped if len(d["annotations"]) > 2]
    assert len(crowded) == (8 if crops else 1)  # a crop loses objects of both images


class ResizeShortestEdge(Augmentation):
    """A project's copy of Detectron2's class."""

    def __init__(self):
        self.short_edge_length, self.max_size = list(range(30, 81)), 133

    def get_transform(self, image, boxes=None):
        size = np.random.choice(self.short_edge_length)
        return ResizeTransform(*image.shape[:2], size, size * image.shape[1] // image.shape[0])


def own_read_image(file):
    with open(file, "rb") as f:
        return np.asarray(Image.open(f))


def dropping_read_image(file):
    return own_read_image(file) if os.path.exists(file) else None


def trainer_of(read):
    """A trainer whose mapper reads files by this function, and resizes by a copied class."""

    def mapper(d):
        image = read(d["file_name"])
        if image is None:
            return None
        image = ResizeShortestEdge()(AugInput(image)).apply_image(image)
        labels = read(d["sem_seg_file_name"])
        found = torch.as_tensor(labels.astype("int64"))
        return {**d, "image": torch.as_tensor(image.transpose(2, 0, 1).copy()), "sem_seg": found}

    class Trainer:
        @staticmethod
        def build_train_loader(cfg):
            return build_detection_train_loader(cfg, mapper=mapper)

    return Trainer


@pytest.mark.parametrize("read", [own_read_image, dropping_read_image, cv2.imread])
def test_a_mapper_reads_and_resizes_by_copies_of_detectron2s_code(read, tmp_path, catalogs):
    labels = str(tmp_path / "labels.png")
    cv2.imwrite(labels, np.arange(64, dtype=np.uint8).reshape(8, 8) % 5)
    image = {"file_name": "", "sem_seg_file_name": labels, "height": 480, "width": 640}
    DatasetCatalog.register("copies_test", lambda: [dict(image)])
    cfg = make_cfg(DATASETS__TRAIN=("copies_test",))
    (image,) = Job.from_trainer(trainer_of(read), cfg, 1).training_batch(1)
    assert image["image"].shape[1:] == (80, 106)
    assert len(image["sem_seg"].unique()) == 5


def test_images_have_what_the_loader_adds_to_its_dicts(dataset):
    class Trainer:
        @staticmethod
        def build_train_loader(cfg):
            dicts = [d for name in cfg.DATASETS.TRAIN for d in DatasetCatalog.get(name)]
            for d in dicts:
                d["dataset_source"] = 3
            return build_detection_train_loader(cfg, dataset=dicts, sampler=TrainingSampler(9))

    for name in (dataset, "nobody_has_it"):
        job = Job.from_trainer(Trainer, make_cfg(DATASETS__TRAIN=(name,), **SMALL), 1)
        assert [d["dataset_source"] for d in job.training_batch(2)] == [3, 3]
