# Copyright (c) the d2_memfit developers.
"""Frozen modules and adapters: what is trained, memory, checkpoints."""

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import build_model
from detectron2.solver import build_optimizer
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage
from injection import iterate
from tiny import images, parameters, relative_difference, tiny_cfg
from tiny_transformers import tiny_transformers_cfg
from torch import nn

from d2_memfit import AccumulatingTrainer, compat
from d2_memfit.engine.checkpoint import MemfitCheckpointer
from d2_memfit.errors import ConfigError
from d2_memfit.job import Job
from d2_memfit.memory import TensorMeter
from d2_memfit.planner.steps import Session
from d2_memfit.techniques import apply_techniques

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def peft():
    pytest.importorskip("peft")  # here, because its import takes two seconds


SWIN = {
    "backbone_config": {
        "model_type": "swin",
        "embed_dim": 16,
        "depths": [1, 1, 1, 1],
        "num_heads": [2, 2, 2, 2],
        "window_size": 4,
        "image_size": 128,
        "drop_path_rate": 0.0,
        "out_features": ["stage1", "stage2", "stage3", "stage4"],
    }
}


def cfg_of(family, frozen=(), rank=None):
    if family == "swin":
        cfg = tiny_transformers_cfg("mask2former", has_masks=True, **SWIN)
    elif family == "vit":
        cfg = tiny_transformers_cfg("rf_detr")
    else:
        cfg = tiny_cfg(family)
    cfg.MEMFIT.FINE_TUNE.FROZEN = list(frozen)
    cfg.MEMFIT.FINE_TUNE.LORA_RANK = rank
    return cfg


def model_of(cfg, seed=0):
    torch.manual_seed(seed)
    return apply_techniques("model", build_model(cfg), cfg)


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


def batch():
    dicts = images(2, size=128)
    for d in dicts:
        boxes = Instances((128, 128))
        boxes.gt_boxes = Boxes(d["instances"].gt_boxes.tensor.clamp(max=127))
        boxes.gt_classes = d["instances"].gt_classes
        boxes.gt_masks = d["instances"].gt_masks
        d["instances"] = boxes
    return dicts


def trainer_of(cfg, folder=None, seed=0, num_iterations=4):
    model = model_of(cfg, seed)
    trainer = AccumulatingTrainer(
        model, [batch()] * num_iterations, build_optimizer(cfg, model), clip_gradients=None
    )
    checkpointer = MemfitCheckpointer(model, str(folder or ""), trainer=trainer)
    return trainer, checkpointer


def test_the_pretrained_part_is_frozen_and_the_pyramid_learns():
    cfg = cfg_of("mask_rcnn", ["backbone"])
    cfg.MODEL.RESNETS.NORM = "BN"
    model = model_of(cfg)
    names = trained(model)
    assert not any(name.startswith("backbone.bottom_up.") for name in names)
    assert "backbone.fpn_lateral2.weight" in names
    before = {k: v.clone() for k, v in model.backbone.bottom_up.state_dict().items()}
    with EventStorage():
        sum(model.train()(images(2)).values()).backward()
    after = model.backbone.bottom_up.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)  # statistics of batch norms, too


def test_other_modules_are_frozen_by_their_names():
    model = model_of(cfg_of("mask_rcnn", ["backbone.bottom_up.res*", "roi_heads.mask_head"]))
    names = trained(model)
    assert any(name.startswith("backbone.bottom_up.stem") for name in names)
    assert not any(".res4." in name or "mask_head" in name for name in names)
    with pytest.raises(ConfigError, match="no module of the model matches 'backbones'"):
        model_of(cfg_of("mask_rcnn", ["backbones"]))


def peak_of_a_step(cfg):
    trainer, _ = trainer_of(cfg)
    with TensorMeter() as meter:
        iterate(trainer, 2)
        return meter.peak_bytes


def test_a_step_with_a_frozen_backbone_needs_less():
    cfg, frozen = cfg_of("faster_rcnn"), cfg_of("faster_rcnn", ["backbone"])
    assert peak_of_a_step(frozen) < 0.8 * peak_of_a_step(cfg)


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_adapters_are_trained_and_nothing_else_of_the_backbone(family):
    model = model_of(cfg_of(family, rank=2))
    of_backbone = {n for n in trained(model) if ".encoder." in n or "backbone.backbone." in n}
    in_backbone = {n for n in of_backbone if "lora_" in n}
    assert in_backbone
    if family == "vit":
        assert of_backbone == in_backbone
    sum(model.train()(batch()).values()).backward()
    unused = [n for n, p in model.named_parameters() if "lora_B" in n and not p.grad.any()]
    assert not unused


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_they_begin_at_plain_weights_and_plain_detectron2_loads_what_was_learnt(family, tmp_path):
    plain = model_of(cfg_of(family), seed=1)
    torch.save({"model": plain.state_dict()}, tmp_path / "pretrained.pth")
    cfg = cfg_of(family, rank=2)
    trainer, checkpointer = trainer_of(cfg, tmp_path)
    checkpointer.load(str(tmp_path / "pretrained.pth"), checkpointables=[])
    assert scores(trainer.model) == pytest.approx(scores(plain), abs=1e-6)

    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.01
    iterate(trainer, 3)
    checkpointer.save("model_final", iteration=2)
    other = model_of(cfg_of(family), seed=2)
    DetectionCheckpointer(other).load(str(tmp_path / "model_final.pth"))
    assert scores(other) == pytest.approx(scores(trainer.model), abs=1e-6)
    assert scores(other) != pytest.approx(scores(plain), abs=1e-5)


def scores(model):
    """Outputs for an image, as a flat list."""
    model.eval()
    with torch.no_grad():
        (output,) = model(batch()[:1])
    model.train()
    instances = output["instances"]
    return instances.scores.sort().values.tolist()


def test_a_resumed_run_goes_on_from_the_adapters_themselves(tmp_path):
    cfg = cfg_of("vit", rank=2)
    straight, _ = trainer_of(cfg)
    torch.manual_seed(3)
    iterate(straight, 4)
    first, checkpointer = trainer_of(cfg, tmp_path)
    torch.manual_seed(3)
    iterate(first, 2)
    checkpointer.save("model_0000001", iteration=1)
    second, checkpointer = trainer_of(cfg, tmp_path, seed=5)
    checkpointer.load(str(tmp_path / "model_0000001.pth"))
    second.restore_again()
    iterate(second, 2, first=2)
    expected, actual = parameters(straight.model), parameters(second.model)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def steps_on_rank(rank, cfg, num_ranks):
    """Adapters after two steps with two images each, on one rank or on two."""
    model = model_of(cfg)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    wrapped = compat.create_ddp_model(model) if num_ranks > 1 else model
    share = slice(rank, rank + 1) if num_ranks > 1 else slice(None)
    iterate(AccumulatingTrainer(wrapped, [batch()[share]] * 2, optimizer), 2)
    return {name: value for name, value in parameters(model).items() if "lora_" in name}


def test_two_ranks_train_the_adapters_of_one_process(two_ranks):
    cfg = cfg_of("vit", rank=2)
    expected = steps_on_rank(0, cfg, 1)
    actual, other = two_ranks.run(steps_on_rank, cfg, 2)
    assert relative_difference(actual, expected) < 1e-5
    assert all(torch.equal(actual[name], other[name]) for name in actual)
    assert any(value.any() for name, value in actual.items() if "lora_B" in name)


def test_a_dry_run_has_the_memory_of_one_that_is_computed(computing):
    cfg = cfg_of("vit", rank=2)
    job = Job.from_cfg(cfg, 1, batch=batch())
    dry = Session(job).train(job.training_batch(2))
    computing()
    computed = Session(job).train(job.training_batch(2))
    assert sum(dry.peak().values()) == pytest.approx(sum(computed.peak().values()), rel=0.001)


def test_a_backbone_of_convolutions_has_no_adapters():
    with pytest.raises(ConfigError, match=r"backbone.bottom_up has none. MEMFIT.FINE_TUNE.FROZEN"):
        model_of(cfg_of("faster_rcnn", rank=2))


def test_layers_that_are_never_called_have_none():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Sequential(
                nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, dim_feedforward=8)
            )

    cfg = cfg_of("faster_rcnn", rank=2)
    model = apply_techniques("model", Model(), cfg)
    adapted = {name.partition(".lora_")[0] for name in trained(model)}
    assert adapted == {"backbone.0"}


def test_a_model_without_a_backbone_is_an_error():
    with pytest.raises(ConfigError, match="the model has no module named backbone"):
        apply_techniques("model", nn.Linear(2, 2), cfg_of("faster_rcnn", ["backbone"]))
