# Copyright (c) the d2_memfit developers.
"""Metadata of datasets that nobody has registered."""

import pytest
from detectron2.data import MetadataCatalog

from d2_memfit.config.load import load_cfg
from d2_memfit.explain.rebuild import _describe_datasets as describe_datasets


def described(name, mapper):
    cfg = load_cfg()
    cfg.INPUT.DATASET_MAPPER_NAME = mapper
    cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES = 6
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = (name,), ("coco_2017_val",)
    describe_datasets(cfg)
    return MetadataCatalog.get(name)


@pytest.mark.parametrize(
    ("mapper", "kind"),
    [("mask_former_semantic", "sem_seg"), ("coco_panoptic_lsj", "coco_panoptic_seg"), ("", "coco")],
)
def test_the_mapper_tells_what_labels_there_are(mapper, kind):
    metadata = described("of_a_stranger", mapper)
    assert (metadata.evaluator_type, metadata.ignore_label) == (kind, 255)
    assert len(metadata.stuff_classes) == 6
    assert described("coco_2017_train", mapper).evaluator_type == "coco"  # registered: left alone
