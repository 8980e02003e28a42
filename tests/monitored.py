"""A small training job whose memory the monitoring hooks look at."""

import random

import torch
from tiny import images, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer

__all__ = ["batches", "make_trainer"]


def make_trainer(loader, family="proposal_network", **kwargs):
    model = tiny_model(tiny_cfg(family))
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
