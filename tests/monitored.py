# Copyright (c) the d2_memfit developers.
"""Small training jobs whose memory hooks look at."""

import itertools
import random

import torch
from tiny import images, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer

__all__ = ["batches", "cheap_trainer", "make_trainer"]


def make_trainer(loader, family="proposal_network", fpn=False, **kwargs):
    model = tiny_model(tiny_cfg(family, fpn=fpn))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    return AccumulatingTrainer(model, loader, optimizer, **kwargs)


def batches(seed=0):
    """Of images of all sizes."""
    rng = random.Random(seed)
    sizes = [32, 48, 64, 96, 128]
    pool = [
        images(1, i, size=rng.choice(sizes), num_instances=rng.randint(1, 9)) for i in range(16)
    ]
    while True:
        yield rng.choice(pool) + rng.choice(pool)


class Linear(torch.nn.Linear):
    def forward(self, batch):
        return {"loss": super().forward(batch).square().mean()}


def cheap_trainer(loader=None):
    """Of iterations that take a millisecond."""
    model = Linear(8, 2)
    loader = itertools.repeat(torch.ones(2, 8)) if loader is None else loader
    return AccumulatingTrainer(model, loader, torch.optim.SGD(model.parameters(), lr=1e-4))
