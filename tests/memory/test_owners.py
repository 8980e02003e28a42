# Copyright (c) the d2_memfit developers.

import pytest
import torch
from detectron2.utils.events import EventStorage
from tiny import images, tiny_cfg, tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode

from d2_memfit.memory import OwnerMeter, TensorMeter, live_tensors

FAMILIES = ["mask_rcnn", "retinanet"]


def bytes_of(tensors):
    return sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("family", FAMILIES)
def test_owners_add_up_and_have_what_is_theirs(family):
    model = tiny_model(tiny_cfg(family))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with OwnerMeter(model, optimizer) as meter, EventStorage():
        losses = model(images(2))
        forward = dict(meter.live)
        sum(losses.values()).backward()
        del losses
        optimizer.step()
        assert meter.live["gradients"] == bytes_of(p.grad for p in model.parameters())
        assert meter.live["parameters"] == bytes_of(model.parameters())
        assert meter.live["buffers"] == bytes_of(model.buffers())
        assert meter.live["optimizer"] == meter.live["gradients"]  # momentum
        optimizer.zero_grad(set_to_none=True)
        assert meter.live["gradients"] == 0
    assert sum(meter.live.values()) == meter.live_bytes
    head = "head" if family == "retinanet" else "proposal_generator"
    for part in ("backbone.bottom_up.res3", "backbone", head):
        assert forward[f"activations: {part}"] > 0
    assert (
        forward["activations: backbone.bottom_up.res3"]
        > forward["activations: backbone.bottom_up.res5"]
    )


def test_live_tensors_are_told_apart():
    model = tiny_model(tiny_cfg("proposal_network"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with EventStorage():
        sum(model(images(1)).values()).backward()
    optimizer.step()
    kept = {"list": [torch.zeros(1234, 56)]}
    with FakeTensorMode():  # as torch.compile leaves them
        kept["fake"] = [torch.zeros(77, 5)]
    sizes = live_tensors(model, optimizer)
    for owner in ("parameters", "gradients", "optimizer"):
        of_owner = [size for (found, _), size in sizes.items() if found == owner]
        assert sum(of_owner) == bytes_of(model.parameters())
    assert sizes["tensors", "float32 [1234, 56] on cpu"] == kept["list"][0].nbytes
    assert ("tensors", "float32 [77, 5] on cpu") not in sizes


def test_what_comes_to_life_counts_until_it_is_freed():
    with TensorMeter() as meter:
        a = torch.zeros(1000)
        assert meter.live_bytes == 4000
        b = a + 1
        assert meter.live_bytes == 8000
        del a
        assert meter.live_bytes == 4000
    del b
    assert meter.live_bytes == 0
    assert meter.peak_bytes == 8000


def test_views_and_operators_in_place_cost_nothing():
    with TensorMeter() as meter:
        a = torch.zeros(10, 100)
        view = a.t()[3:].reshape(-1, 10)[0]
        a.add_(1).relu_()
        del a
        assert meter.live_bytes == 4000  # the view keeps all of it
        del view
        assert meter.live_bytes == 0
