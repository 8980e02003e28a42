# Copyright (c) the d2_memfit developers.
"""The technique with config keys. ``checkpointed``, which recovery uses, has a file of its own."""

import copy
import re

import pytest
import torch
from detectron2.modeling import build_model
from detectron2.utils.events import EventStorage
from tiny import images, parameters, relative_difference, tiny_cfg, tiny_model

from d2_memfit.compat import create_ddp_model
from d2_memfit.errors import ConfigError
from d2_memfit.memory import TensorMeter
from d2_memfit.techniques import get_technique

pytestmark = pytest.mark.slow


def apply(model, *modules):
    cfg = tiny_cfg()
    cfg.MEMFIT.CHECKPOINT.MODULES = list(modules)
    assert get_technique("ActivationCheckpointing").is_on(cfg)
    return get_technique("ActivationCheckpointing").apply(model, cfg)


def step(model, batch):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with EventStorage() as storage:
        sum(model(batch).values()).backward()
    return storage


def extended(model):
    """Names of the modules whose forward is no longer their own."""
    return [name for name, m in model.named_modules() if "forward" in vars(m)]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (
            ["backbone.bottom_up.res3.*"],
            [f"backbone.bottom_up.res3.{i}" for i in range(4)],
        ),
        (["roi_heads.mask_head"], ["roi_heads.mask_head"]),
        (
            ["*_head", "roi_heads.mask_head.*"],
            [
                "proposal_generator.rpn_head",
                "roi_heads.box_head",
                "roi_heads.mask_head",
            ],
        ),
        (["*res2", "*res2.0"], ["backbone.bottom_up.res2"]),
    ],
)
def test_patterns_name_the_outermost_modules_that_match(patterns, expected):
    assert extended(apply(tiny_model(tiny_cfg("mask_rcnn")), *patterns)) == expected


def test_ready_made_choices_are_stages_and_blocks():
    stages = extended(apply(tiny_model(tiny_cfg("mask_rcnn")), "backbone"))
    assert stages == [f"backbone.bottom_up.{s}" for s in ("stem", "res2", "res3", "res4", "res5")]
    blocks = extended(apply(tiny_model(tiny_cfg("mask_rcnn")), "all"))
    assert blocks[len(stages)] == "proposal_generator.rpn_head"
    assert {*stages, "roi_heads.box_head", "roi_heads.mask_head"} < set(blocks)


def test_a_backbone_is_found_wherever_it_is():
    plain = {"detr": tiny_model(tiny_cfg("mask_rcnn"))}  # as DETR's meta-architecture has it
    found = extended(apply(torch.nn.ModuleDict(plain), "backbone"))
    stages = ("stem", "res2", "res3", "res4", "res5")
    assert found == [f"detr.backbone.bottom_up.{s}" for s in stages]
    renamed = torch.nn.ModuleDict({"trunk": tiny_model(tiny_cfg("mask_rcnn")).backbone})
    assert apply(renamed, "backbone") is renamed  # by its class


@pytest.mark.parametrize("choice", ["backbone", "all"])
def test_a_ready_made_choice_that_finds_nothing_is_an_error(choice):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(inplace=True))
    with pytest.raises(ConfigError, match=f"MODULES: '{re.escape(choice)}' finds no blocks"):
        apply(model, choice)


def test_a_module_list_stands_for_the_modules_in_it():
    cfg = tiny_cfg("faster_rcnn")
    cfg.MODEL.ROI_HEADS.NAME = "CascadeROIHeads"
    cfg.MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG = True
    model = tiny_model(cfg)
    apply(model, "roi_heads.box_head")
    assert extended(model) == [f"roi_heads.box_head.{i}" for i in range(3)]


def test_a_pattern_that_matches_nothing_is_an_error_that_lists_near_names():
    message = r"CHECKPOINT.MODULES: no module .*bottom.res4' \(did you mean .*bottom_up.res4"
    with pytest.raises(ConfigError, match=message):
        apply(tiny_model(tiny_cfg()), "backbone.bottom.res4")


@pytest.mark.parametrize("value", [[1], "backbone", 3])
def test_a_value_that_is_no_list_of_names_is_an_error(value):
    cfg = tiny_cfg()
    cfg.MEMFIT.CHECKPOINT.MODULES = value
    with pytest.raises(ConfigError, match=r"CHECKPOINT.MODULES must be a list of names"):
        get_technique("ActivationCheckpointing").is_on(cfg)


def test_it_needs_less_memory():
    batch, peaks = images(2, size=256), []
    for modules in ([], ["backbone"], ["all"]):
        model = tiny_model(tiny_cfg("mask_rcnn"))
        if modules:
            apply(model, *modules)
        with TensorMeter() as meter:
            step(model, batch)
        peaks.append(meter.peak_bytes)
    assert peaks[1] < 0.8 * peaks[0]
    assert peaks[2] < peaks[1]


def test_state_dicts_are_those_of_plain_detectron2():
    plain, changed = (tiny_model(tiny_cfg("mask_rcnn"), seed=s) for s in (0, 1))
    apply(changed, "all")
    plain.load_state_dict(changed.state_dict(), strict=True)
    assert relative_difference(parameters(plain), parameters(changed)) == 0
    changed.load_state_dict(tiny_model(tiny_cfg("mask_rcnn"), seed=2).state_dict(), strict=True)


def test_a_copy_of_the_model_computes_with_its_own_weights():
    model = apply(tiny_model(tiny_cfg("mask_rcnn")), "backbone")
    copied = copy.deepcopy(model)
    batch = images(1)
    step(model, batch)
    step(copied, batch)
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    actual = {n: p.grad for n, p in copied.named_parameters() if p.grad is not None}
    assert relative_difference(actual, expected) == 0
    assert next(copied.parameters()).data_ptr() != next(model.parameters()).data_ptr()


def test_running_statistics_and_scalars_change_once():
    cfg = tiny_cfg("mask_rcnn")
    cfg.MODEL.RESNETS.NORM = "BN"
    plain, changed = tiny_model(cfg), apply(tiny_model(cfg), "all")
    scalars = [
        {k: h.values() for k, h in step(model, images(2)).histories().items()}
        for model in (plain, changed)
    ]
    assert scalars[0] == scalars[1]
    assert any("mask_rcnn" in name for name in scalars[0])
    for (name, a), e in zip(changed.named_buffers(), plain.buffers()):
        assert torch.equal(a, e), name


def test_batch_normalisation_in_eval_mode_within_a_trained_block():
    cfg = tiny_cfg("proposal_network")
    cfg.MODEL.RESNETS.NORM = "BN"
    model = apply(tiny_model(cfg), "backbone")
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    step(model, images(1))
    assert model.backbone.bottom_up.res2[0].conv1.weight.grad is not None


def test_a_second_backward_through_the_same_graph():
    model = apply(tiny_model(tiny_cfg("proposal_network")), "backbone")
    weight = model.backbone.bottom_up.res2[0].conv1.weight
    torch.manual_seed(0)
    with EventStorage():
        loss = sum(model(images(1)).values())
        loss.backward(retain_graph=True)
        first = weight.grad.clone()
        loss.backward()
    torch.testing.assert_close(weight.grad, 2 * first)


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


def test_outputs_that_are_no_tensors():
    class Pyramid(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 4, 3)

        def forward(self, x, *, scale):
            return {"a": self.conv(x) * scale, "b": [x, None]}

    plain = torch.nn.Sequential()
    plain.part = Pyramid()
    changed = copy.deepcopy(plain)
    apply(changed, "part")
    x = torch.rand(1, 3, 8, 8)
    for model in (plain, changed):
        outputs = model.part(x, scale=2.0)
        assert outputs["b"] == [x, None]
        outputs["a"].sum().backward()
    assert torch.equal(plain.part.conv.weight.grad, changed.part.conv.weight.grad)


def test_all_of_detectron2s_backbones_can_be_told():
    cfg = tiny_cfg("mask_rcnn")
    cfg.MODEL.BACKBONE.NAME = "build_resnet_backbone"
    cfg.MODEL.RESNETS.OUT_FEATURES = cfg.MODEL.RPN.IN_FEATURES = ["res4"]
    cfg.MODEL.ROI_HEADS.NAME = "Res5ROIHeads"
    cfg.MODEL.ROI_HEADS.IN_FEATURES = ["res4"]
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [[32]]
    torch.manual_seed(0)
    step(apply(build_model(cfg), "all"), images(1))


class Calls(torch.nn.Module):
    """What its call does is not in ``forward``."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
        self.num_calls = 0

    def __call__(self, x, scale=1.0):
        self.num_calls += 1
        return self.layers(x) * scale


class CallsForward(Calls):
    def __call__(self, x, scale=1.0):
        return torch.nn.Module.__call__(self, x, scale=scale)

    def forward(self, x, scale):
        return super().__call__(x, scale)


def with_another_forward():
    module = CallsForward()
    module.forward = lambda x, scale: module.layers(x) * scale
    return module


@pytest.mark.parametrize("make", [Calls, CallsForward, with_another_forward])
def test_a_module_that_is_called_in_its_own_way(make):
    x, results = torch.rand(1024, 64), []
    for patterns in ([], ["part"]):
        torch.manual_seed(0)
        model = torch.nn.Sequential()
        model.part = make()
        if patterns:
            apply(model, *patterns)
        with TensorMeter() as meter:
            out = model.part(x, scale=2.0)
            kept = meter.live_bytes
            out.sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        results.append((kept, gradients, model.part.num_calls))
    (kept, expected, num_calls), (kept_less, actual, num_calls_again) = results
    assert kept_less < 0.5 * kept
    assert relative_difference(actual, expected) == 0
    assert num_calls_again == num_calls  # what is computed again is not counted
