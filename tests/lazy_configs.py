# Copyright (c) the d2_memfit developers.
"""A LazyConfig of a tiny detector, whose datasets nobody has."""

import detectron2.data.transforms as T
import torch
from detectron2.config import LazyCall
from detectron2.data import (
    DatasetMapper,
    build_detection_test_loader,
    build_detection_train_loader,
    get_detection_dataset_dicts,
)
from detectron2.solver.build import get_default_optimizer_params
from omegaconf import OmegaConf
from tiny import tiny_cfg, tiny_model


def lazy_config(**train):
    mapper = {
        "augmentations": [LazyCall(T.ResizeShortestEdge)(short_edge_length=64, max_size=100)],
        "image_format": "BGR",
    }
    loader = LazyCall(build_detection_train_loader)(
        dataset=LazyCall(get_detection_dataset_dicts)(names="nobody_has_it"),
        mapper=LazyCall(DatasetMapper)(is_train=True, **mapper),
        total_batch_size=4,
        num_workers=0,
    )
    test = LazyCall(build_detection_test_loader)(
        dataset=LazyCall(get_detection_dataset_dicts)(names="nor_this", filter_empty=False),
        mapper=LazyCall(DatasetMapper)(is_train=False, **mapper),
    )
    optimizer = LazyCall(torch.optim.AdamW)(
        params=LazyCall(get_default_optimizer_params)(base_lr="${..lr}"), lr=0.01
    )
    train = {
        **{"output_dir": "output", "init_checkpoint": "", "max_iter": 2, "device": "cpu"},
        **{"amp": {"enabled": False}, "ddp": {}, **train},
    }
    model = LazyCall(tiny_model)(cfg=LazyCall(tiny_cfg)(family="faster_rcnn"))
    return OmegaConf.create(
        {
            "model": model,
            "optimizer": optimizer,
            "dataloader": {"train": loader, "test": test, "evaluator": {}},
            "train": train,
        },
        flags={"allow_objects": True},
    )
