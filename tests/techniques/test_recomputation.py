# Copyright (c) the d2_memfit developers.
import contextlib
import copy
import random
from functools import partial

import numpy as np
import pytest
import torch
from detector_parts import Detector
from detectron2.structures import Instances
from tiny import tiny_cfg
from torch import nn

from d2_memfit.engine.retry import _low_memory as low_memory_step
from d2_memfit.techniques import offload
from d2_memfit.techniques.checkpointing import Recomputed, checkpointed
from d2_memfit.techniques.registry import apply_techniques


def seed():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def step(model, *args, context=contextlib.nullcontext, **kwargs):
    """The loss, gradients of parameters and buffers of a forward and a backward."""
    model.zero_grad(set_to_none=True)
    seed()
    with context():
        losses = model(*args, **kwargs)
        loss = sum(losses.values()) if isinstance(losses, dict) else losses.square().mean()
        loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients, **dict(copy.deepcopy(model).named_buffers())}


def with_keys(model, *keys):
    cfg = tiny_cfg()
    cfg.merge_from_list(list(keys))
    return apply_techniques("model", model, cfg)


CHECKPOINT = ("MEMFIT.CHECKPOINT.MODULES", ["all"])
OFFLOAD = ("MEMFIT.OFFLOAD.MODULES", ["*"])


@pytest.mark.parametrize(
    ("keys", "context"),
    [
        (CHECKPOINT, contextlib.nullcontext),
        (CHECKPOINT, torch.autograd.graph.save_on_cpu),
        ((*CHECKPOINT, *OFFLOAD), contextlib.nullcontext),
        (("MEMFIT.CHECKPOINT.MODULES", ["backbone"]), contextlib.nullcontext),
        ((), None),
    ],
)
def test_transformers_have_the_same_losses_gradients_and_statistics(keys, context, monkeypatch):
    """Attention computes query, key and value at once where they are one tensor."""
    monkeypatch.setattr(offload, "_SMALLEST_BYTES", 1)
    seed()
    plain, x = Detector(), torch.rand(2, 24, 16)
    changed = with_keys(copy.deepcopy(plain), *keys)
    context = context or (lambda: low_memory_step(changed))
    step(copy.deepcopy(plain), x)  # the first of a process may round differently
    for _ in range(2):
        expected, actual = step(plain, x), step(changed, x, context=context)
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[k], expected[k]) for k in expected)


class Given(nn.Module):
    """Notes which of its arguments are the same tensor, and appends to a list that it is given."""

    def __init__(self, note):
        super().__init__()
        self.linear, self.note = nn.Linear(4, 4), note

    def forward(self, a, others, *, c, instances):
        self.note((a is others[0], a is others[1]["b"], a is c, instances.a is a))
        others.append("mine")
        y = self.linear(a) * others[1]["b"] + c
        return {"y": y, "instances": instances}


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.autograd.graph.save_on_cpu])
def test_tensors_given_twice_are_one_when_computed_again(context):
    seen = []  # not of the module, where it would be put back
    module, x = Given(seen.append), torch.rand(3, 4, requires_grad=True)
    others, instances = [x, {"b": x}], Instances((1, 1), a=x)
    with context():
        out = Recomputed()(module, module.forward, x, others, c=torch.ones(4), instances=instances)
        assert out["instances"] is instances
        assert others == [x, {"b": x}, "mine"]  # the module is given the list itself
        out["y"].sum().backward()
    assert seen[0] == (True, True, False, True)
    assert seen[1][:3] == (True, True, False)
    assert len(others) == 3
    assert x.grad is not None


class InPlace(nn.Module):
    """A block that begins with a layer that changes its input."""

    def __init__(self):
        super().__init__()
        self.norm, self.act = nn.BatchNorm1d(8), nn.ReLU(inplace=True)
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        y = self.norm(self.drop(torch.ones_like(x)))  # done twice in the first forward
        return x + self.linear(self.act(x)) + y


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.Sequential(InPlace(), InPlace())

    def forward(self, x):
        return self.blocks(self.first(x) * 2)


@pytest.mark.parametrize("is_in_recovery", [False, True])
def test_a_block_that_changes_its_input_is_left_out_and_it_is_said(is_in_recovery, log):
    seed()
    plain, x = Twice(), torch.randn(4, 8)
    changed = (
        copy.deepcopy(plain) if is_in_recovery else with_keys(copy.deepcopy(plain), *CHECKPOINT)
    )
    context = partial(checkpointed, changed) if is_in_recovery else contextlib.nullcontext
    for _ in range(2):
        expected, actual = step(plain, x), step(changed, x, context=context)
        assert all(torch.equal(actual[k], expected[k]) for k in expected)
    said = [r.message.split()[4] for r in log.records if "(aten.relu_)" in r.message]
    assert ("InPlace" if is_in_recovery else "Sequential") in said


def test_recovery_leaves_the_model_as_it_was():
    model = Detector()
    names, before = list(model.state_dict()), [set(vars(m)) for m in model.modules()]
    with checkpointed(model):
        assert list(model.state_dict()) == names
    assert [set(vars(m)) for m in model.modules()] == before


class Draws(nn.Module):
    """Drops paths as some projects do, with the generators of Python and NumPy."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.linear(x) * random.random() + self.norm(x) * np.random.rand()


def test_numbers_of_python_and_numpy_are_drawn_again():
    seed()
    plain, x = nn.Sequential(nn.ModuleDict(), Draws())[1:], torch.randn(4, 8)
    changed = with_keys(copy.deepcopy(plain), *CHECKPOINT)
    expected, after = step(plain, x), (random.random(), np.random.rand())
    actual, after_again = step(changed, x), (random.random(), np.random.rand())
    assert all(torch.equal(actual[k], expected[k]) for k in expected)
    assert after_again == after
