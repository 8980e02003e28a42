# Copyright (c) the d2_memfit developers.
"""Small training jobs whose memory the monitoring hooks look at.

    python monitored.py

trains for 500 iterations with a loader whose worker keeps 1 MiB in each.
"""

import itertools
import logging
import random

import numpy as np
import torch
from tiny import images, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer
from d2_memfit.engine.hooks import LeakDetector

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


class Keeping(torch.utils.data.IterableDataset):
    def __iter__(self):
        kept = []
        for i in itertools.count():
            kept.append(np.ones(2**17))
            yield torch.full((2, 8), i % 7 / 7)


if __name__ == "__main__":
    logging.basicConfig()
    trainer = cheap_trainer(torch.utils.data.DataLoader(Keeping(), batch_size=None, num_workers=1))
    trainer.register_hooks([LeakDetector()])
    trainer.train(0, 500)
