# Copyright (c) the d2_memfit developers.
"""Metadata of datasets that nobody has registered."""

import pytest
from detectron2.data import MetadataCatalog

from d2_memfit.config.load import load_cfg
from d2_memfit.explain.rebuild import _describe_datasets as describe_datasets


def described(name, mapper, num_classes=6):
    cfg = load_cfg()
    cfg.INPUT.DATASET_MAPPER_NAME = mapper
    cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES = num_classes
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = (name,), ("coco_2017_val",)
    describe_datasets(cfg)
    return MetadataCatalog.get(name)


@pytest.mark.parametrize(
    ("mapper", "kind"),
    [
        ("mask_former_semantic", "sem_seg"),
        ("coco_panoptic_lsj", "coco_panoptic_seg"),
        ("coco_instance_lsj", "coco"),
        ("", "coco"),
    ],
)
def test_the_mapper_tells_what_labels_there_are(mapper, kind):
    metadata = described("of_a_stranger", mapper)
    assert metadata.evaluator_type == kind
    assert metadata.ignore_label == 255
    assert len(metadata.stuff_classes) == 6


def test_registered_datasets_are_left_alone():
    assert described("coco_2017_train", "mask_former_semantic").evaluator_type == "coco"
