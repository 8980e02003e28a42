# Copyright (c) the d2_memfit developers.
from detector_parts import MLP, Block, Detector, SeriesHead
from tiny import tiny_cfg, tiny_model
from torch import nn

from d2_memfit.techniques.blocks import find_blocks


def test_blocks_of_transformers_and_heads():
    assert find_blocks(Detector()) == [
        "backbone.stages.0.blocks.0",
        "backbone.stages.0.blocks.1",
        "backbone.stages.1.blocks.0",
        "backbone.stages.1.blocks.1",
        "vit.0",
        "vit.1",
        "neck.0",
        "neck.1",
        "encoder.layers.0",
        "encoder.layers.1",
        "decoder.layers.0",
        "decoder.layers.1",
        "listed.0",
        "listed.1",
        "head_series.0",
        "head_series.1",
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


def test_stages_of_a_resnet_stand_before_their_blocks():
    names = find_blocks(tiny_model(tiny_cfg("mask_rcnn")))
    assert names[:4] == [f"backbone.bottom_up.{n}" for n in ("stem", "res2", "res2.0", "res2.1")]
    assert names[-4:] == [
        "proposal_generator.rpn_head",
        "roi_heads.box_head",
        "roi_heads.box_predictor",
        "roi_heads.mask_head",
    ]
