# Copyright (c) the d2_memfit developers.
"""The technique with config keys. ``checkpointed``, which recovery uses, has a file of its own."""

import copy
import re

import pytest
import torch
from detectron2.utils.events import EventStorage
from tiny import images, relative_difference, tiny_cfg, tiny_model

from d2_memfit.common.compat import create_ddp_model
from d2_memfit.common.errors import ConfigError
from d2_memfit.config.settings import check_settings
from d2_memfit.memory import TensorMeter
from d2_memfit.techniques.registry import apply_techniques


def apply(model, *modules):
    cfg = tiny_cfg()
    cfg.MEMFIT.CHECKPOINT.MODULES = list(modules)
    check_settings(cfg)
    return apply_techniques("model", model, cfg)


def step(model, batch):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with EventStorage() as storage:
        sum(model(batch).values()).backward()
    return storage


def extended(model):
    """Names of the modules whose forward is no longer their own."""
    return [name for name, m in model.named_modules() if "forward" in vars(m)]


def whole_cfg():
    """With all blocks of a ResNet-50."""
    cfg = tiny_cfg("mask_rcnn")
    cfg.MODEL.BACKBONE.NAME = "build_resnet_fpn_backbone"
    return cfg


STAGES = [f"backbone.bottom_up.{s}" for s in ("stem", "res2", "res3", "res4", "res5")]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["backbone.bottom_up.res3.*"], [f"backbone.bottom_up.res3.{i}" for i in range(4)]),
        (["r*.*_head", "roi_heads.mask_head.*"], ["roi_heads.box_head", "roi_heads.mask_head"]),
        (["*res2", "*res2.0"], ["backbone.bottom_up.res2"]),
        (["backbone"], STAGES),
    ],
)
def test_patterns_name_the_outermost_modules_that_match(patterns, expected):
    model = tiny_model(whole_cfg())
    assert extended(apply(model, *patterns)) == expected


def test_ready_made_choices_are_blocks_and_a_backbone_wherever_it_is():
    model = tiny_model(tiny_cfg("mask_rcnn"))
    plain = {"detr": copy.deepcopy(model)}  # as DETR's meta-architecture has it
    found = extended(apply(torch.nn.ModuleDict(plain), "backbone"))
    assert found == [f"detr.{stage}" for stage in STAGES]
    blocks = extended(apply(model, "all"))
    assert {*STAGES, "proposal_generator.rpn_head", "roi_heads.mask_head"} < set(blocks)


@pytest.mark.parametrize("choice", ["backbone", "all", "backbone.bottom.res4"])
def test_what_matches_nothing_is_an_error(choice):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(inplace=True))
    with pytest.raises(ConfigError, match=f"CHECKPOINT.MODULES: .*'{re.escape(choice)}'"):
        apply(model, choice)


def test_near_names_are_listed():
    with pytest.raises(ConfigError, match=r"bottom.res4' \(did you mean .*bottom_up.res4"):
        apply(tiny_model(tiny_cfg()), "backbone.bottom.res4")


def test_it_needs_less_memory():
    batch, peaks = images(2, size=256), []
    for modules in ([], ["backbone"], ["all"]):
        model = tiny_model(whole_cfg())
        if modules:
            apply(model, *modules)
        with TensorMeter() as meter:
            step(model, batch)
        peaks.append(meter.peak_bytes)
    assert peaks[1] < 0.8 * peaks[0]
    assert peaks[2] < peaks[1]


class WithUnusedParameter(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.backbone, self.model = model.backbone, model
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, batch):
        return self.model(batch)


def gradients_on_a_rank(rank, is_on):
    """DDP reduces gradients in the backward, where the forward is computed again."""
    model = WithUnusedParameter(tiny_model(tiny_cfg("proposal_network")))
    if is_on:
        apply(model, "backbone")
    ddp = create_ddp_model(model, broadcast_buffers=False, find_unused_parameters=True)
    for _ in range(2):  # DDP orders its buckets anew after the first
        step(ddp, images(2, first=2 * rank))
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_ranks_with_ddp_and_an_unused_parameter(two_ranks):
    expected, actual = (two_ranks.run(gradients_on_a_rank, is_on) for is_on in (False, True))
    for e, a in zip(expected, actual):
        assert a.keys() == e.keys()
        assert relative_difference(a, e) == 0
