# Copyright (c) the d2_memfit developers.
"""The pictures of a training's first images, and that they change nothing that is trained."""

import numpy as np
import pytest
import torch
from detectron2.data import MetadataCatalog
from detectron2.utils.events import EventStorage
from tiny import read_metrics, tiny_cfg

from d2_memfit import MemfitTrainer
from d2_memfit.cli.first_images import FirstImages

pytestmark = pytest.mark.slow


def trained(folder, with_pictures, start_iter=0):
    """Metrics and pictures of two iterations, whose augmentations draw in this process."""
    cfg = tiny_cfg("mask_rcnn")
    cfg.OUTPUT_DIR = str(folder)
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("coins_train",), ()
    cfg.SEED = 1
    cfg.DATALOADER.NUM_WORKERS = 0
    cfg.INPUT.RANDOM_FLIP, cfg.SOLVER.MAX_ITER = "horizontal", start_iter + 2
    np.random.seed(1)
    torch.manual_seed(1)
    trainer = MemfitTrainer(cfg)
    trainer.start_iter = start_iter
    pictures = []
    if with_pictures:
        trainer.register_hooks([FirstImages("BGR", MetadataCatalog.get("coins_train"))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EventStorage, "put_image", lambda _, *picture: pictures.append(picture))
        trainer.train()
    losses = [{k: v for k, v in m.items() if "loss" in k} for m in read_metrics(folder)]
    return losses, pictures


def test_the_first_images_are_drawn_and_the_training_is_the_same(coins, tmp_path):
    plain, none = trained(tmp_path / "plain", False)
    drawn, pictures = trained(tmp_path / "drawn", True)
    assert not none
    assert drawn == plain
    assert [name for name, _ in pictures] == [f"first images/{i}" for i in range(len(pictures))]
    for _, picture in pictures:
        assert picture.dtype == torch.uint8
        assert picture.shape[0] == 3
        gray = picture.float().std(dim=0)
        assert gray.max() > 20  # coins are gray, and boxes are not
        assert 0.001 < (gray > 20).float().mean() < 0.9


def test_a_resumed_run_has_no_pictures(coins, tmp_path):
    assert not trained(tmp_path, True, start_iter=3)[1]


def test_what_cannot_be_drawn_ends_no_training(coins, tmp_path, monkeypatch, log):
    monkeypatch.setattr(FirstImages, "_picture", lambda *_: 1 / 0)
    losses, _ = trained(tmp_path, True)
    assert losses
    assert "The first images cannot be drawn (ZeroDivisionError: division by zero)" in log.text
