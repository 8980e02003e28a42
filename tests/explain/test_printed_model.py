# Copyright (c) the d2_memfit developers.
"""Parameters, from a model's text."""

import pytest
from tiny import tiny_cfg, tiny_model
from torch import nn

from d2_memfit.explain.printed_model import parameters_in


def number(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ["mask_rcnn", "keypoint_rcnn", "retinanet"])
@pytest.mark.parametrize("norm", ["FrozenBN", "BN", "GN"])
def test_detectors_have_the_parameters_that_their_text_shows(family, norm):
    cfg = tiny_cfg(family)
    cfg.MODEL.RESNETS.NORM = norm if norm != "GN" else "BN"
    cfg.MODEL.RESNETS.STEM_OUT_CHANNELS = cfg.MODEL.FPN.OUT_CHANNELS = 32
    cfg.MODEL.FPN.NORM = "GN" if norm == "GN" else ""
    model = tiny_model(cfg)
    assert parameters_in(str(model)) == number(model)


def test_transformers_repeat_layers_and_hide_those_of_attention():
    lists = nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(4, 5)])
    model = nn.ModuleDict({"t": nn.Transformer(16, 2, 6, 1, 24), "lists": lists})
    assert " 6 x " in str(model)
    assert " 2 x Linear" in str(model)
    assert parameters_in(str(model)) == number(model)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 16, 3, groups=4),
        nn.ConvTranspose2d(8, 4, 2, bias=False),
        nn.Conv1d(3, 5, 7),
        nn.LayerNorm(12),
        nn.LayerNorm(12, elementwise_affine=False),
        nn.InstanceNorm2d(12),
        nn.Embedding(7, 9),
        nn.ReLU(),
    ],
    ids=str,
)
def test_single_layers(layer):
    assert parameters_in(str(nn.Sequential(layer))) == number(layer)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "(a): Conv2d(1, 2, kernel_size=(3, 3), groups=0)",
        "(a): Conv2d(1, 2, kernel_size=(" + "999999999, " * 9 + "))",
        "(a): Conv2d(",
        "\n".join(" " * i + f"({i}): 999 x Block(" for i in range(900)) + "\n" + " " * 950 + "(a): "
        "Linear(in_features=999999999, out_features=999999999)",
        "(a): Linear(" + "9" * 5000,
    ],
    ids=range(6),
)
def test_hostile_text_is_a_number_of_a_sensible_size(text):
    assert 0 <= parameters_in(text) <= 10**13
