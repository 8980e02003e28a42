# Copyright (c) the d2_memfit developers.
from detector_parts import MLP, Block, Detector, SeriesHead
from torch import nn

from d2_memfit.techniques.technique import find_blocks


def test_blocks_of_transformers_and_heads():
    assert find_blocks(Detector()) == [
        *(f"backbone.stages.{i}.blocks.{j}" for i in range(2) for j in range(2)),
        *(f"{name}.{i}" for name in ("vit", "neck") for i in range(2)),
        *(f"{name}.layers.{i}" for name in ("encoder", "decoder") for i in range(2)),
        *(f"{name}.{i}" for name in ("listed", "head_series") for i in range(2)),
        "bbox_embed",
    ]


def test_single_layers_and_what_is_never_called_are_no_blocks():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 2)])
    model.act = nn.ReLU(inplace=True)
    model.holder = nn.Module()  # without a forward
    model.holder.a, model.holder.b = nn.Linear(2, 2), nn.Linear(2, 2)
    model.pool = nn.Sequential(nn.MaxPool2d(2), nn.ReLU(inplace=True))  # without parameters
    assert find_blocks(model) == []


def test_members_of_a_series_are_of_one_class():
    pairs = nn.Sequential(Block(4), MLP(4), Block(4))
    assert find_blocks(nn.ModuleList([pairs])) == ["0.0", "0.1", "0.2"]
    alone = nn.ModuleList([Block(4), SeriesHead(4)])  # what is in them is found
    assert find_blocks(alone) == ["0.attn", "0.mlp", "1.attention"]
