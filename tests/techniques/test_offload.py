# Copyright (c) the d2_memfit developers.
from contextlib import nullcontext

import pytest
import torch
from detectron2.utils.events import EventStorage
from tiny import images, tiny_cfg, tiny_model

from d2_memfit.common.errors import HostMemoryError
from d2_memfit.config.settings import check_settings
from d2_memfit.memory import TensorMeter
from d2_memfit.techniques import offload
from d2_memfit.techniques.registry import apply_techniques


def apply(model, *modules):
    cfg = tiny_cfg()
    cfg.MEMFIT.OFFLOAD.MODULES = list(modules)
    check_settings(cfg)
    return apply_techniques("model", model, cfg)


def layers(number=6, *between):
    """Each saves 4 MiB; ReLU between the last two saves what the last convolution saves again."""
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    *first, last = [torch.nn.Conv2d(4, 4, 3, padding=1) for _ in range(number)]
    model.part = torch.nn.Sequential(*first, *between, last, torch.nn.Sigmoid())
    return model, torch.rand(1, 4, 512, 512, requires_grad=True)


def gradients(model, x):
    model.zero_grad(set_to_none=True)
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


def copied(monkeypatch):
    """Sizes in bytes of the tensors that are copied to the host."""
    sizes, make = [], offload._HostCopy
    monkeypatch.setattr(offload, "_HostCopy", lambda t, b: sizes.append(t.nbytes) or make(t, b))
    return sizes


def test_each_tensor_is_copied_once(monkeypatch):
    copies = copied(monkeypatch)
    model, x = layers(2, torch.nn.ReLU())
    expected = gradients(model, x)
    for a, e in zip(gradients(apply(model, "part"), x), expected):
        assert torch.equal(a, e)
    assert len(copies) == 3  # the input, what ReLU makes, and the result


def test_weights_stay_where_they_are(monkeypatch):
    copies = copied(monkeypatch)
    model = torch.nn.Sequential()
    model.part = torch.nn.Linear(1024, 1024)  # 4 MiB, which the gradient of the input needs
    gradients(apply(model, "part"), torch.rand(1, 1024, requires_grad=True))
    assert copies == []


def test_a_change_in_place_is_no_other_result():
    class InPlace(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(()))

        def forward(self, x):
            y = torch.sigmoid(x)
            y.mul_(2)
            return y * self.w

    model = torch.nn.Sequential()
    model.part = InPlace()
    apply(model, "part")
    x = torch.zeros(2**20, requires_grad=True)
    model(x).sum().backward()
    assert model.part.w.grad == 2**20  # plain PyTorch cannot tell, and raises
    assert (x.grad == 0.5).all()  # of sigmoid's result before the change


@pytest.mark.parametrize("most", [1, 2, 4, 1000])
def test_the_tensors_of_copies_in_flight_are_bounded(most, monkeypatch):
    monkeypatch.setattr(offload, "MOST_IN_FLIGHT", most)
    model, x = layers()
    apply(model, "part")
    with TensorMeter() as meter:
        result = model(x).sum()
        kept = meter.live_bytes
        result.backward()
    tensors = 6  # of what layers make; the input is not of the forward
    assert kept // 2**22 == min(most, tensors)


class Stream:
    """A made-up stream of a GPU: what it is asked for, in order."""

    def __init__(self, asked):
        self.asked = asked
        self.copies = 0

    def wait_stream(self, other):
        self.asked.append("copies wait for the computation")

    def record_event(self):
        self.copies += 1
        self.asked.append(f"copy {self.copies}")
        return self.copies

    def wait_event(self, event):
        self.asked.append(f"wait {event}")


def test_on_a_made_up_card_no_memory_is_free_before_its_copy_ended(monkeypatch):
    asked = []
    monkeypatch.setattr(offload, "MOST_IN_FLIGHT", 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(asked))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    empty_like = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda t, device, pin_memory=None: empty_like(t, device=device)
    )
    model, x = layers(3)
    expected = gradients(model, x)
    apply(model, "part")
    *_, moves = model.part.forward.args
    moves._stream = Stream(asked)
    for _ in range(2):
        asked.clear()
        for a, e in zip(gradients(model, x), expected):
            assert torch.equal(a, e)
        events = [a.split() for a in asked if a[:4] in ("copy", "wait")]
        numbers = [int(number) for what, number in events if what == "copy"]
        waits = [int(number) for what, number in events if what == "wait"]
        left, fetched = numbers[:4], numbers[4:]
        # To the host, each source but the last is waited for at the next copy, and the last one is
        # taken as it is. Each of the others is fetched ahead, and waited for when it is needed.
        assert waits == [*left[:-1], left[-1], *fetched]
        in_flight = 0
        for what, _ in events:
            in_flight += 1 if what == "copy" else -1
            assert in_flight <= 2
    assert moves._coming is None


def test_on_the_cpu_a_warning_says_that_it_saves_nothing(log):
    apply(layers()[0], "part")
    assert "MEMFIT.OFFLOAD.MODULES saves nothing with MODEL.DEVICE cpu" in log.text


def test_inputs_of_checkpoints_within_are_offloaded(monkeypatch):
    monkeypatch.setattr(offload, "_SMALLEST_BYTES", 1)
    sizes = copied(monkeypatch)
    both, one = tiny_model(tiny_cfg("mask_rcnn")), tiny_model(tiny_cfg("mask_rcnn"))
    cfg = tiny_cfg()
    cfg.MEMFIT.CHECKPOINT.MODULES = ["backbone"]
    apply_techniques("model", both, cfg)
    totals = []
    for model in (apply(one, "backbone"), apply(both, "backbone")):
        sizes.clear()
        with EventStorage():
            sum(model(images(2)).values())
        totals.append(sum(sizes))
    assert 0 < totals[1] < 0.6 * totals[0]


def test_a_host_with_little_memory_left(monkeypatch):
    model, x = layers()
    apply(model, "part")
    gradients(model, x)
    monkeypatch.setattr(offload, "available_host_bytes", lambda: 2**28)
    with pytest.raises(HostMemoryError, match=r"OFFLOAD.MODULES: no host memory .*256 MiB would"):
        gradients(model, x)
