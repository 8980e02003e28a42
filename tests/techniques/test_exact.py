# Copyright (c) the d2_memfit developers.
"""Each exact technique of models: the same losses, gradients, statistics and logged scalars."""

import copy
import functools

import pytest
import torch
from detectron2.utils.events import EventStorage
from injection import seed_all
from tiny import images, relative_difference, suggested, tiny_cfg, tiny_model

from d2_memfit.techniques.registry import TECHNIQUES, apply_techniques

FAMILIES = ["proposal_network", "faster_rcnn", "mask_rcnn", "keypoint_rcnn", "retinanet"]
TECHNIQUES_OF_MODELS = [t.name for t in TECHNIQUES if (t.tier, t.part) == ("exact", "model")]


def step(model, batch, dtype=None):
    """Losses, gradients, buffers and logged scalars of a forward and a backward."""
    model.zero_grad(set_to_none=True)
    seed_all()
    with EventStorage() as storage:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            losses = model(copy.deepcopy(batch))
        sum(losses.values()).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    scalars = {k: h.values() for k, h in storage.histories().items()}
    return losses, gradients, buffers, scalars


def settings(name, cfg):
    settings = suggested(name, cfg)
    for key in settings:
        if key.endswith("CHUNK_SIZE"):
            settings[key] = (
                5 if "HEADS" in key else 37
            )  # several chunks, of which the last is smaller
    return settings


def with_techniques(cfg, names):
    cfg = cfg.clone()
    for name in names:
        for key, value in settings(name, cfg).items():
            cfg.merge_from_list([key, value])
    return cfg


def cfg_of(family):
    cfg = tiny_cfg(family)
    cfg.MODEL.RESNETS.NORM = "BN"
    cfg.MODEL.BACKBONE.FREEZE_AT = 2
    cfg.INPUT.MASK_FORMAT = "bitmask"  # as those of images()
    return cfg


def batch_of(dtype):
    return images(2, size=128 if dtype else 64)


@functools.cache
def plain_steps(family, dtype):
    """Two of a model: running statistics of the first count in the second."""
    cfg = cfg_of(family)
    step(tiny_model(cfg), batch_of(dtype), dtype)  # a process's first backward may round otherwise
    model = tiny_model(cfg)
    return [step(model, batch_of(dtype), dtype) for _ in range(2)]


def assert_same_steps(family, names, dtype=None):
    cfg = cfg_of(family)
    changed = apply_techniques("model", tiny_model(cfg), with_techniques(cfg, names))
    for expected in plain_steps(family, dtype):
        actual = step(changed, batch_of(dtype), dtype)
        assert actual[3].keys() == expected[3].keys()  # scalars
        assert dtype or actual[3] == expected[3]
        for e, a in zip(expected[:3], actual[:3]):
            assert a.keys() == e.keys()
            if "ChunkedHeads" in names:  # the gradients of its weights are sums of those of chunks
                assert relative_difference(a, e) < (1e-2 if dtype else 1e-6)
            else:
                assert all(torch.equal(a[k], e[k]) for k in e)


@pytest.mark.parametrize("name", TECHNIQUES_OF_MODELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_alone(name, family):
    cfg = cfg_of(family)
    if not settings(name, cfg):
        pytest.skip(f"{name} has nothing to do in a {family}")
    assert_same_steps(family, [name])


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_together(family, dtype):
    cfg = cfg_of(family)
    names = [name for name in TECHNIQUES_OF_MODELS if settings(name, cfg)]
    assert_same_steps(family, names, dtype)
