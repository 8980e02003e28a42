# Copyright (c) the d2_memfit developers.
"""A training job whose memory hooks look at."""

import itertools

import torch

from d2_memfit import AccumulatingTrainer


class Linear(torch.nn.Linear):
    def forward(self, batch):
        return {"loss": super().forward(batch).square().mean()}


def cheap_trainer():
    """Of iterations that take a millisecond."""
    model, loader = Linear(8, 2), itertools.repeat(torch.ones(2, 8))
    return AccumulatingTrainer(model, loader, torch.optim.SGD(model.parameters(), lr=1e-4))
