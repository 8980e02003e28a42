# Copyright (c) the d2_memfit developers.
import contextlib

import pytest
import torch
from detectron2.utils.events import EventStorage
from tiny import images, tiny_cfg, tiny_model

from d2_memfit.techniques.checkpointing import checkpointed

FAMILIES = ["proposal_network", "faster_rcnn", "mask_rcnn", "keypoint_rcnn", "retinanet"]


def step(model, batch, is_on):
    """Gradients of one step."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with EventStorage(), checkpointed(model) if is_on else contextlib.nullcontext():
        sum(model(batch).values()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_same(family):
    batch = images(2, size=128)
    results = []
    for is_on in (False, False, True):  # the first warms up
        results.append(step(tiny_model(tiny_cfg(family)), batch, is_on))
    torch.testing.assert_close(results[2], results[1], rtol=0, atol=0)


def test_the_model_is_left_as_it_was():
    model = tiny_model(tiny_cfg("mask_rcnn"))
    names = list(model.state_dict())
    before = [dict(vars(m)) for m in model.modules()]
    with checkpointed(model):
        assert list(model.state_dict()) == names
    assert [list(vars(m)) for m in model.modules()] == [list(b) for b in before]
