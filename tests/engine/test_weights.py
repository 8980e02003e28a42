# Copyright (c) the d2_memfit developers.
"""Weights of other programs, and those with which a model finds nothing."""

import math
import os

import pytest
import torch
from torch import nn

from d2_memfit.engine.checkpoint import MemfitCheckpointer
from d2_memfit.errors import CheckpointError, DataError

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"]


def make_model():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.register_buffer("mask", torch.full((3,), float("-inf")))  # as of attention
    return model


def load(tmp_path, content):
    file = tmp_path / "w.pth"
    torch.save(content, file)
    model = make_model()
    MemfitCheckpointer(model).load(str(file))
    return model


FORMS = {
    "state_dict": lambda s: {"state_dict": s, "epoch": 3},
    "model_state_dict": lambda s: {"model_state_dict": s},
    "model": lambda s: {"model": s},
    "nothing": lambda s: s,
    "one in another": lambda s: {"model": {"state_dict": s}},
    "DDP": lambda s: {"state_dict": {f"module.{name}": value for name, value in s.items()}},
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_other_programs_are_taken(tmp_path, form):
    torch.manual_seed(3)
    expected = make_model().state_dict()
    loaded = load(tmp_path, FORMS[form](expected)).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_is_not_finite_is_named(tmp_path, name, value):
    state = make_model().state_dict()
    state[name].view(-1)[-1] = value
    if name.startswith("1.running") and not math.isnan(
        value
    ):  # buffers may be infinite, as masks are
        load(tmp_path, state)
        return
    with pytest.raises(CheckpointError) as e:
        load(tmp_path, {"state_dict": state})
    assert str(e.value).endswith(f"has no weights of a model (NaN or infinite values in {name})")


ITSELF = {}
ITSELF["state_dict"] = ITSELF


@pytest.mark.parametrize(
    "content",
    [
        {"model": 5},
        {"model": None},
        [1, 2],
        {"model": {"0.weight": "x"}},
        {"model": {1: torch.ones(1)}},
        {"model": {"0.weight": torch.eye(2).to_sparse()}},
        {"model": {"0.weight": torch.eye(2, device="meta")}},
        ITSELF,
    ],
)
def test_what_has_no_weights_is_one_line(tmp_path, content):
    with pytest.raises(CheckpointError, match=r"w\.pth has no weights of a model \("):
        load(tmp_path, content)


def test_a_pipe_is_not_opened(tmp_path, alarm):
    os.mkfifo(tmp_path / "w.pth")
    checkpointer = MemfitCheckpointer(make_model(), str(tmp_path))
    with pytest.raises(DataError, match=r"w\.pth"):
        checkpointer.check(str(tmp_path / "w.pth"), resume=False)
    os.mkfifo(tmp_path / "last_checkpoint")
    with pytest.raises(DataError, match="last_checkpoint"):
        checkpointer.get_checkpoint_file()
