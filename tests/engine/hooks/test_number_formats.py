# Copyright (c) the d2_memfit developers.
"""The comparison of losses in 16 bits with those in float32."""

import logging

import pytest
import torch
from detectron2.utils.events import EventStorage
from torch import nn

from d2_memfit import AccumulatingTrainer
from d2_memfit.engine.hooks import compare_number_formats
from d2_memfit.settings import RecoveryOptions


class Model(nn.Module):
    """A linear layer with a running mean, noise, and a loss that overflows in float16 on demand."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.norm = nn.BatchNorm1d(4)
        self.factor = factor

    def forward(self, x):
        y = self.linear(self.norm(x) + 0.1 * torch.rand(x.shape))
        return {"loss_a": (y.abs() * self.factor).sum(), "loss_b": y.float().square().sum()}


def said_of(model, log):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = torch.get_rng_state()
    with EventStorage(), log.at_level(logging.INFO):
        autocast = torch.autocast("cpu", dtype=torch.float16)
        compare_number_formats(model, lambda: model(x), autocast)
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name])
    assert all(p.grad is None for p in model.parameters())
    return [(r.levelname, r.message) for r in log.records]


def test_losses_that_are_alike_are_said_in_one_line(log):
    [(level, text)] = said_of(Model(), log)
    assert level == "INFO"
    assert text.startswith("Losses in 16 bits are within ")
    assert "loss_a " in text


def test_a_loss_that_overflows_is_a_warning(log):
    [(level, text)] = said_of(Model(1e6), log)
    assert level == "WARNING"
    assert "loss_a inf for " in text
    assert "SOLVER.AMP.ENABLED False" in text


def test_a_forward_that_fails_is_not_an_error(log):
    model = Model()
    model.forward = None
    [(level, text)] = said_of(model, log)
    assert level == "INFO"
    assert text.endswith("TypeError")


@pytest.mark.parametrize(("precision", "lines"), [("fp16", 1), ("fp32", 0)])
def test_a_run_compares_once(precision, lines, log):
    model = Model()
    batches = [torch.randn(8, 4) for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = AccumulatingTrainer(model, batches, optimizer, precision=precision)
    with log.at_level(logging.INFO):
        trainer.train(0, 2)
    assert sum(r.message.startswith("Losses in 16 bits") for r in log.records) == lines


def test_more_images_than_fit_are_compared_in_smaller_micro_batches(log):
    model = Model()
    forward = model.forward

    def limited(batch):
        if len(batch) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(torch.stack([image["image"] for image in batch]).flatten(1))

    model.forward = limited
    batches = [[{"image": torch.randn(1, 2, 2)} for _ in range(8)] for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = AccumulatingTrainer(
        model, batches, optimizer, precision="fp16", recovery=RecoveryOptions()
    )
    with log.at_level(logging.INFO):
        trainer.train(0, 2)
    said = [r.message for r in log.records if r.message.startswith("Losses in 16 bits")]
    assert said[0].endswith("not compared with those in float32: OutOfMemoryError")
    assert len(said) == 2
    assert " of those in float32: loss_a " in said[1]
