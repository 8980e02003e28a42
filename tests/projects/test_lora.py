# Copyright (c) the d2_memfit developers.
"""Low-rank adapters: a technique that projects/ViTDet adds to the list."""

import importlib.util

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import build_model
from detectron2.solver import build_optimizer
from injection import iterate
from tiny import ROOT, images, parameters, relative_difference, suggested, tiny_cfg
from tiny_transformers import tiny_transformers_cfg

from d2_memfit import AccumulatingTrainer
from d2_memfit.engine.checkpoint import MemfitCheckpointer
from d2_memfit.techniques.registry import TECHNIQUES, apply_techniques


@pytest.fixture(scope="module", autouse=True)
def registered():
    pytest.importorskip("peft")  # here, because its import takes two seconds
    before = TECHNIQUES[:]
    file = ROOT / "projects" / "ViTDet" / "configs" / "lora.py"
    spec = importlib.util.spec_from_file_location("lora", file)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert [t.name for t in TECHNIQUES[len(before) :]] == ["LowRankAdapters"]
    yield
    TECHNIQUES[:] = before


def cfg_of(rank=None):
    cfg = tiny_transformers_cfg("rf_detr")
    cfg.MEMFIT.LORA_RANK = rank
    return cfg


def model_of(cfg, seed=0):
    torch.manual_seed(seed)
    return apply_techniques("model", build_model(cfg), cfg)


def trainer_of(cfg, folder, seed=0):
    model = model_of(cfg, seed)
    optimizer = build_optimizer(cfg, model)
    trainer = AccumulatingTrainer(model, [images(2, size=128)] * 4, optimizer)
    return trainer, MemfitCheckpointer(model, str(folder), trainer=trainer)


def scores(model):
    model.eval()
    with torch.no_grad():
        (output,) = model(images(1, size=128))
    model.train()
    return output["instances"].scores.sort().values.tolist()


def test_they_begin_at_plain_weights_and_plain_detectron2_and_they_load_what_was_learnt(tmp_path):
    plain = model_of(cfg_of(), seed=1)
    torch.save({"model": plain.state_dict()}, tmp_path / "pretrained.pth")
    trainer, checkpointer = trainer_of(cfg_of(rank=2), tmp_path)
    checkpointer.load(str(tmp_path / "pretrained.pth"), checkpointables=[])
    assert scores(trainer.model) == pytest.approx(scores(plain), abs=1e-6)
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.01
    iterate(trainer, 3)
    checkpointer.save("model_final", iteration=2)
    other = model_of(cfg_of(), seed=2)
    DetectionCheckpointer(other).load(str(tmp_path / "model_final.pth"))
    assert scores(other) == pytest.approx(scores(trainer.model), abs=1e-6)
    assert scores(other) != pytest.approx(scores(plain), abs=1e-5)
    resumed, checkpointer = trainer_of(cfg_of(rank=2), tmp_path, seed=5)
    checkpointer.load(str(tmp_path / "model_final.pth"))
    assert relative_difference(parameters(resumed.model), parameters(trainer.model)) == 0


def test_a_plan_tries_them_where_there_are_linear_layers():
    cfg = cfg_of()
    cfg.MODEL.WEIGHTS = "pretrained.pth"
    assert suggested("LowRankAdapters", cfg) == {"MEMFIT.LORA_RANK": 8}
    cfg = tiny_cfg("faster_rcnn")
    cfg.MODEL.WEIGHTS, cfg.MEMFIT.LORA_RANK = "pretrained.pth", None
    assert suggested("LowRankAdapters", cfg) == {}
