# Copyright (c) the d2_memfit developers.
"""A function of the user's own for the losses."""

import pytest
import torch
from injection import iterate
from tiny import every_anchor_counts, images, parameters, relative_difference, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer
from d2_memfit.common.compat import create_ddp_model

BATCH = images(8)


def sgd(model, lr=0.01):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def start(dtype=torch.float32):
    """A model whose loss is a mean over images."""
    cfg = every_anchor_counts(tiny_cfg("proposal_network", fpn=False))
    model = tiny_model(cfg, dtype=dtype)
    model.proposal_generator.predict_proposals = lambda *args: None  # its NMS takes no float64
    return model


def trained(cut, kind=AccumulatingTrainer, model=None, num_iterations=3, **kwargs):
    """The parameters after some iterations of 8 images, in batches of ``cut``."""
    model = model or start()
    loader = [BATCH[i : i + cut] for i in range(0, 8, cut)] * num_iterations
    trainer = kind(model, loader, sgd(model), 8 // cut, **kwargs)
    storage = iterate(trainer, num_iterations)
    return parameters(model), storage, trainer


def wrapped_on_rank(rank, steps):
    model = create_ddp_model(start(), broadcast_buffers=False)
    own = images(4, first=4 * rank)
    loader = [own] if steps == 1 else [own[:2], own[2:]]
    iterate(AccumulatingTrainer(model, loader, sgd(model), steps, loss_fn=halves))
    return parameters(model.module)


def halves(model, batch):
    """Two forwards behind one backward, as semi-supervised training has them."""
    assert type(model).__name__ == "DistributedDataParallel"
    half = len(batch) // 2
    first, second = model(batch[:half]), model(batch[half:])
    return {k: (first[k] + second[k]) / 2 for k in first}


@pytest.mark.parametrize("steps", [1, 2])
def test_on_several_ranks_it_gets_the_wrapped_model(two_ranks, steps):
    results = two_ranks.run(wrapped_on_rank, steps)
    full, _, _ = trained(8, num_iterations=1)
    assert relative_difference(results[0], full) < 1e-6
    assert relative_difference(results[1], results[0]) == 0
