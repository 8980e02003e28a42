# Copyright (c) the d2_memfit developers.
"""The files of a trained model."""

import torch
from tiny import tiny_cfg, tiny_model


def save_trained(folder, family="mask_rcnn", fpn=False, **keys):
    """A config and random weights, as a training leaves them; every score is a detection."""
    cfg = tiny_cfg(family, image_size=128, fpn=fpn)
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = cfg.MODEL.RETINANET.SCORE_THRESH_TEST = 0.0
    cfg.TEST.DETECTIONS_PER_IMAGE = 10
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("not_registered_here",), ()
    for key, value in keys.items():
        cfg.merge_from_list([key.replace("__", "."), value])
    folder.mkdir(exist_ok=True)
    torch.save({"model": tiny_model(cfg).state_dict()}, folder / "model_final.pth")
    (folder / "config.yaml").write_text(cfg.dump())
    return folder / "config.yaml"
