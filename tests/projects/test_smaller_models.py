# Copyright (c) the d2_memfit developers.
"""Small digits, int8 and pruned models of projects/SmallerModels."""

import copy
import importlib.util
import json
import sys

import prune
import pytest
import quantize
import torch
from compare import megabytes
from make_digits import make_digits
from tiny import images, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer
from d2_memfit.engine.resuming import MemfitCheckpointer
from d2_memfit.errors import ConfigError


def without_labels(batch):
    return [{k: v for k, v in image.items() if k != "instances"} for image in batch]


BATCH = without_labels(images(2))


def cfg_with_batch_norm(family="mask_rcnn"):
    cfg = tiny_cfg(family)
    cfg.MODEL.RESNETS.NORM = cfg.MODEL.FPN.NORM = "BN"
    return cfg


def found(model):
    with torch.inference_mode():
        return [output["instances"] for output in model.eval()(BATCH)]


def save(model, file):
    torch.save({"model": model.state_dict()}, file)
    return str(file)


def load(model, file):
    checkpointer = MemfitCheckpointer(model)
    checkpointer.check(file, resume=False)
    checkpointer.load(file)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["FrozenBN", "BN"])
@pytest.mark.parametrize("family", ["mask_rcnn", "retinanet"])
def test_an_int8_model_finds_what_the_model_finds(family, norm):
    cfg = tiny_cfg(family)
    cfg.MODEL.RESNETS.NORM = norm
    model = tiny_model(cfg).eval()
    features = model.backbone(images_of(model))
    int8 = quantize.to_int8(copy.deepcopy(model), lambda prepared: prepared(BATCH))
    for level, rounded in int8.backbone(images_of(model)).items():
        assert (rounded - features[level]).norm() < 0.15 * features[level].norm(), level
    assert megabytes(int8) < 0.7 * megabytes(model)
    for expected, actual in zip(found(model), found(int8)):
        best = expected[:1], actual[:1]
        assert best[1].scores.tolist() == pytest.approx(best[0].scores.tolist(), abs=0.02)


def images_of(model):
    return model.preprocess_image(BATCH).tensor


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["resnet", "shufflenet_v2_x0_5"])
def test_int8_weights_are_loaded_by_the_trainer_that_predict_takes(backbone, tmp_path):
    cfg = tiny_cfg("mask_rcnn")
    cfg.MODEL.BACKBONE.NAME = f"build_{backbone}_fpn_backbone"
    int8 = quantize.to_int8(tiny_model(cfg), lambda prepared: prepared(BATCH))
    loaded = load(quantize.Trainer.build_model(cfg), save(int8, tmp_path / "int8.pth"))
    for expected, actual in zip(found(int8), found(loaded)):
        assert torch.equal(expected.pred_boxes.tensor, actual.pred_boxes.tensor)
        assert torch.equal(expected.scores, actual.scores)


@pytest.mark.slow
def test_int8_heads_take_images_without_proposals():
    int8 = quantize.to_int8(tiny_model(tiny_cfg("mask_rcnn")), lambda prepared: prepared(BATCH))
    with torch.inference_mode():
        assert int8.roi_heads.box_head(torch.zeros(0, 16, 7, 7)).shape == (0, 32)
        assert int8.roi_heads.mask_head.layers(torch.zeros(0, 16, 14, 14)).shape[0] == 0


def test_int8_is_for_the_cpu():
    with pytest.raises(ConfigError, match=r"MODEL.DEVICE cpu, got 'cuda'"):
        quantize.Trainer.build_model(tiny_cfg(device="cuda"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["faster_rcnn", pytest.param("retinanet", marks=pytest.mark.long)]
)
def test_a_pruned_model_is_smaller_trains_and_is_loaded_again(family, tmp_path):
    pytest.importorskip("torch_pruning")
    cfg = cfg_with_batch_norm(family)
    model = tiny_model(cfg)
    before = sum(p.numel() for p in model.parameters())
    shapes = {level: f.shape for level, f in model.eval().backbone(images_of(model)).items()}
    prune.prune(model, 0.5)
    assert sum(p.numel() for p in model.parameters()) < 0.6 * before
    assert shapes == {level: f.shape for level, f in model.backbone(images_of(model)).items()}

    cfg.MODEL.WEIGHTS = save(model, tmp_path / "pruned.pth")
    loaded = load(prune.Trainer.build_model(cfg), cfg.MODEL.WEIGHTS)
    assert {n: p.shape for n, p in loaded.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }
    for expected, actual in zip(found(model), found(loaded)):
        assert torch.equal(expected.scores, actual.scores)

    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.01)
    trainer = AccumulatingTrainer(loaded.train(), [images(2), images(2, first=2)], optimizer, 2)
    trainer.train(0, 1)
    again = load(prune.Trainer.build_model(cfg), save(loaded, tmp_path / "trained.pth"))
    for expected, actual in zip(found(loaded), found(again)):
        assert torch.equal(expected.scores, actual.scores)
    int8 = quantize.to_int8(again, lambda prepared: prepared(BATCH))
    file = save(int8, tmp_path / "int8.pth")
    load(quantize.PrunedTrainer.build_model(cfg), file)


@pytest.mark.skipif(
    importlib.util.find_spec("torch_pruning") is not None, reason="torch-pruning is here"
)
def test_without_torch_pruning_the_error_names_the_command():
    with pytest.raises(ConfigError, match=r"pip install torch-pruning"):
        prune.prune(tiny_model(cfg_with_batch_norm()), 0.5)


def test_what_cannot_be_pruned_is_said_in_one_line():
    pytest.importorskip("torch_pruning")
    with pytest.raises(ConfigError, match=r"--ratio must be between 0 and 1, got 1.5"):
        prune.prune(tiny_model(cfg_with_batch_norm()), 1.5)
    with pytest.raises(ConfigError, match=r"needs batch norm, got FrozenBatchNorm2d"):
        prune.prune(tiny_model(tiny_cfg()), 0.5)


def test_a_dataset_that_is_not_there_is_said_before_the_model_is_pruned(
    tmp_path, monkeypatch, capsys
):
    cfg = cfg_with_batch_norm()
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = (), ("nowhere_val",)
    config, weights = tmp_path / "config.yaml", tmp_path / "trained.pth"
    config.write_text(cfg.dump())
    weights.touch()
    args = ["--config-file", str(config), "--weights", str(weights), "--eval-only"]
    monkeypatch.setattr(sys, "argv", ["prune.py", *args, "OUTPUT_DIR", str(tmp_path / "pruned")])
    with pytest.raises(SystemExit):
        prune.main()
    assert "DATASETS.TEST names 'nowhere_val'" in capsys.readouterr().err
    assert not (tmp_path / "pruned").exists()


def test_pruned_weights_must_be_named():
    with pytest.raises(ConfigError, match=r"MODEL.WEIGHTS must name the pruned weights"):
        prune.Trainer.build_model(tiny_cfg())


@pytest.mark.slow
def test_digits_are_the_same_each_time(tmp_path):
    pytest.importorskip("sklearn")
    for folder in ("first", "second"):
        make_digits(tmp_path / folder)
    files = [sorted(p for p in (tmp_path / f).rglob("[!.]*.*")) for f in ("first", "second")]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]]
    coco = json.loads((tmp_path / "first" / "val.json").read_text())
    assert {a["category_id"] for a in coco["annotations"]} == set(range(1, 11))
    for annotation in coco["annotations"]:
        x, y, width, height = annotation["bbox"]
        assert 0 <= x <= x + width <= 224
        assert 0 <= y <= y + height <= 160


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is not None, reason="scikit-learn is here")
def test_without_scikit_learn_the_error_names_the_command(tmp_path):
    with pytest.raises(SystemExit, match=r"pip install scikit-learn"):
        make_digits(tmp_path)
