# Copyright (c) the d2_memfit developers.
"""What training loops of others do with several micro-batches."""

import pytest
import torch
from criteria import Detector, Detr, annotated_images
from torch import nn

from d2_memfit.common.errors import ConfigError, DataError
from d2_memfit.testing import check_accumulation

IMAGES = annotated_images((10, 3, 0, 5))


class MeanOverImages(Detector):
    def forward(self, batch):
        return {"loss": self.features(batch).abs().mean()}


def divided_by(power):
    """A loop that divides each loss by the number of micro-batches, so many times."""

    def accumulate(model, micro_batches):
        for batch in micro_batches:
            (sum(model(batch).values()) / len(micro_batches) ** power).backward()

    return accumulate


@pytest.mark.parametrize(
    ("power", "word", "why"),
    [
        (0, "other", "sums 4 micro-batches and does not divide"),
        (1, "exact", ""),
        (2, "other", "divides by the number of micro-batches twice"),
    ],
)
def test_a_loop_that_divides_too_little_or_too_much_is_found(power, word, why):
    torch.manual_seed(0)
    model = MeanOverImages().double()
    loss, loop = check_accumulation(model, None, IMAGES, divided_by(power))
    assert (loss.what, loss.word) == ("loss", "exact")
    assert (loop.what, loop.word) == ("loop", word)
    assert why in loop.why


def test_a_count_per_micro_batch_is_found_and_named():
    torch.manual_seed(0)
    findings = check_accumulation(Detr().double(), None, IMAGES, divided_by(1))
    words = {f.what: f.word for f in findings}
    assert words == {"loss_ce": "other", "loss_bbox": "other", "loop": "other"}
    assert "loss_bbox" in findings[-1].why


def test_columns_and_a_function_of_the_loss():
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    batch = torch.randn(6, 4).double(), torch.tensor([0, 1, 2, 1, 0, 2])

    def total(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    [finding] = check_accumulation(model, total, batch)
    assert finding.what == "total_loss"
    assert finding.word == "other"


def test_model_and_gradients_stay_as_they_are():
    torch.manual_seed(0)
    model = MeanOverImages().double()
    sum(model(IMAGES).values()).backward()
    before = [(p.detach().clone(), p.grad.clone()) for p in model.parameters()]
    state = torch.get_rng_state()
    check_accumulation(model, None, IMAGES, divided_by(0))
    assert torch.equal(torch.get_rng_state(), state)
    for p, (value, gradient) in zip(model.parameters(), before):
        assert torch.equal(p, value)
        assert torch.equal(p.grad, gradient)


# Bad input


@pytest.mark.parametrize("batch", [IMAGES[:1], {"images": torch.zeros(2, 3, 8, 8)}, []])
def test_a_batch_that_cannot_be_cut_is_an_error(batch):
    with pytest.raises(DataError, match="needs a batch of at least two images"):
        check_accumulation(MeanOverImages(), None, batch)


class Vector(Detector):
    def forward(self, batch):
        return {"loss": self.features(batch).abs().mean((1, 2, 3))}


def walks_back(model, batch):
    loss = model(batch)["loss"]
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize(
    ("kind", "loss_fn", "text"),
    [
        (Vector, None, "losses of one number"),
        (MeanOverImages, walks_back, r"calls backward\(\) by itself"),
        (MeanOverImages, lambda model, batch: 3.0, "must return a loss or a dict"),
    ],
)
def test_losses_that_cannot_be_trained_on_are_an_error(kind, loss_fn, text):
    model = kind().double()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ConfigError, match=text):
        check_accumulation(model, loss_fn, IMAGES)
    assert all(map(torch.equal, before, model.parameters()))
