# Copyright (c) the d2_memfit developers.
"""Light backbones, and pruned, int8 and distilled models of projects/SmallerModels."""

import backbones
import pytest
import smaller
import torch
from forks import run_forked
from tiny import (
    ROOT,
    every_anchor_counts,
    images,
    parameters,
    relative_difference,
    tiny_cfg,
    tiny_model,
)
from torchvision import models

from d2_memfit import AccumulatingTrainer
from d2_memfit.predict.predictor import load_whole_model

PROJECT = ROOT / "projects" / "SmallerModels"


def save(model, file):
    torch.save({"model": model.state_dict()}, file)
    return str(file)


@pytest.mark.parametrize("name", backbones._LIGHT)
def test_a_light_backbone_has_the_features_of_its_classifier(name):
    classifier = getattr(models, name)().eval()
    backbone = backbones.LightBackbone(name, "BN", 0).eval()
    assert not backbone.body.load_state_dict(classifier.state_dict(), strict=False).missing_keys
    layers, last, channels = backbones._LIGHT[name]
    x = torch.rand(1, 3, 64, 96)
    features = backbone(x)
    for number, layer in enumerate(layers[: last[-1] + 1]):
        x = classifier.get_submodule(layer)(x)
        if number in last:
            stage = last.index(number)
            assert torch.equal(features[f"res{stage + 2}"], x)
            assert x.shape[1:] == (channels[stage], 16 >> stage, 24 >> stage)


def test_a_pruned_model_is_smaller_trains_and_is_loaded_again(tmp_path):
    cfg = tiny_cfg("faster_rcnn")
    cfg.MODEL.RESNETS.NORM = cfg.MODEL.FPN.NORM = "BN"
    model = tiny_model(cfg)
    before = sum(p.numel() for p in model.backbone.parameters())
    smaller.prune(model.backbone, 0.5)
    assert sum(p.numel() for p in model.backbone.parameters()) < 0.4 * before
    cfg.MODEL.WEIGHTS = save(model, tmp_path / "pruned.pth")
    loaded = smaller.SmallerTrainer.build_model(cfg)
    load_whole_model(loaded, cfg.MODEL.WEIGHTS)
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.01)
    AccumulatingTrainer(loaded, [images(2), images(2, first=2)], optimizer, 2).train(0, 1)
    again = smaller.SmallerTrainer.build_model(cfg)
    load_whole_model(again, save(loaded, tmp_path / "trained.pth"))
    x = torch.rand(1, 3, 64, 64)
    features = [m.eval().backbone(x)["p3"] for m in (model, loaded, again)]
    assert not torch.equal(features[0], features[1])
    assert torch.equal(features[1], features[2])


def test_accumulated_gradients_of_distillation_are_those_of_the_full_batch(tmp_path):
    teacher, cfg = tiny_cfg("faster_rcnn"), every_anchor_counts(tiny_cfg("faster_rcnn"))
    teacher.MODEL.RESNETS.RES2_OUT_CHANNELS = 64
    (tmp_path / "teacher.yaml").write_text(teacher.dump())
    weights = save(tiny_model(teacher, seed=1), tmp_path / "teacher.pth")
    smaller.add_distillation_config(cfg)
    cfg.DISTILLATION.TEACHER_CONFIG = str(tmp_path / "teacher.yaml")

    def loss_fn(model, batch):
        return {"loss_distillation": model(batch)["loss_distillation"]}

    batch, changes = images(8), []
    for cut in (8, 2):
        torch.manual_seed(0)
        model = smaller.DistillingTrainer.build_model(cfg)
        load_whole_model(model.teacher, weights)
        before = parameters(model)
        loader = [batch[i : i + cut] for i in range(0, 8, cut)]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        AccumulatingTrainer(model, loader, optimizer, 8 // cut, loss_fn=loss_fn).train(0, 1)
        changes.append({name: before[name] - p for name, p in parameters(model).items()})
    assert any(change.abs().max() > 0 for change in changes[0].values())
    assert relative_difference(changes[1], changes[0]) < 1e-5


@pytest.mark.slow
def test_each_way_compares_its_run_with_the_run_before(coins, tmp_path):
    pytest.importorskip("onnxruntime")
    data = ["--coco", "coins_train", coins / "train.json", coins / "train"]
    data += ["--coco", "coins_val", coins / "val.json", coins / "val"]
    short = ["SOLVER.MAX_ITER", 1, "SOLVER.STEPS", "()", "DATALOADER.NUM_WORKERS", 0]
    short += ["INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MIN_SIZE_TEST", 64]
    config = PROJECT / "configs" / "faster_rcnn_R_18_FPN_coins.yaml"

    def run(script, *options):
        result = run_forked(PROJECT / script, *options, cwd=tmp_path)
        assert result.returncode == 0, result.stderr[-4000:]
        return result.stdout

    run("backbones.py", "--config-file", config, *data, *short, "OUTPUT_DIR", "before")
    teacher = ["DISTILLATION.TEACHER_CONFIG", "before/config.yaml"]
    teacher += ["DISTILLATION.TEACHER_WEIGHTS", "before/model_final.pth"]
    for way, opts in {"prune": short, "quantize": [], "distill": [*short, *teacher]}.items():
        command = ["--way", way, "--config-file", "before/config.yaml", *data]
        command += ["OUTPUT_DIR", way, *opts]
        rows = run("smaller.py", *command).splitlines()[-2:]
        assert [row.split()[1] for row in rows] == ["before", way]
