# Copyright (c) the d2_memfit developers.
"""What is taken for datasets that nobody has registered here."""

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

__all__ = ["describe_datasets"]

_MOST_CLASSES = 10_000
_KINDS = {"semantic": "sem_seg", "panoptic": "coco_panoptic_seg"}


def describe_datasets(cfg: CfgNode) -> None:
    """Give datasets that are not registered the metadata that mappers and models ask for.

    The mapper's name in INPUT.DATASET_MAPPER_NAME, which MaskFormer and its successors have, tells
    whether images have label images, segments or objects. Classes have numbers for names.
    """
    mapper = cfg.INPUT.get("DATASET_MAPPER_NAME", "")
    kind = next((kind for word, kind in _KINDS.items() if word in mapper), "coco")
    classes = [f"class {i}" for i in range(min(cfg.MODEL.SEM_SEG_HEAD.NUM_CLASSES, _MOST_CLASSES))]
    ids = {i: i for i in range(len(classes))}
    for name in {*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST} - {*DatasetCatalog}:
        MetadataCatalog.pop(name, None)  # another run may have had a dataset of this name
        MetadataCatalog.get(name).set(
            evaluator_type=kind,
            ignore_label=cfg.MODEL.SEM_SEG_HEAD.IGNORE_VALUE,
            stuff_classes=classes,
            thing_classes=classes,
            stuff_dataset_id_to_contiguous_id=ids,
            thing_dataset_id_to_contiguous_id=ids,
        )
