# Copyright (c) the d2_memfit developers.
"""Ranks that run images again, each on its own."""

import random
from unittest.mock import Mock, patch

import pytest
import torch
from injection import InjectedTrainer, Injector, iterate
from tiny import every_anchor_counts, images, parameters, relative_difference, tiny_cfg, tiny_model

from d2_memfit.common import compat
from d2_memfit.common.errors import OutOfMemoryError
from d2_memfit.config.settings import RecoveryOptions
from d2_memfit.engine.retry import WindowRetries

NUM_IMAGES = 2  # of a rank in an iteration


class WithUnusedParameter(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, batch):
        return self.model(batch)


def proposal_network():
    cfg = every_anchor_counts(tiny_cfg("proposal_network", fpn=False))
    return WithUnusedParameter(tiny_model(cfg))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)


def trainer_on(rank, num_iterations=1, num_ranks=2, **options):
    model = compat.create_ddp_model(proposal_network(), broadcast_buffers=False)
    loader = [
        images(NUM_IMAGES, (i * num_ranks + rank) * NUM_IMAGES % 64, size=32)
        for i in range(num_iterations)
    ]
    options = RecoveryOptions(**options)
    return InjectedTrainer(model, loader, sgd(model), recovery=options)


def train_with_failures(rank, num_ranks, num_iterations, seed):
    """In each iteration one rank fails somewhere, in forward or backward."""
    trainer = trainer_on(rank, num_iterations, num_ranks)
    rng = random.Random(seed)  # the same on all ranks
    num_allocations = 1000
    for i in range(num_iterations):
        unlucky, point = rng.randrange(num_ranks), rng.randrange(1, num_allocations)
        trainer.injector = Injector([point] if rank == unlucky and i else [])
        trainer.cutter.images = None
        iterate(trainer, first=i)
        num_allocations = min(num_allocations, trainer.injector.num_allocations)
    return parameters(trainer.model.module), trainer.recovery.totals.oom_events


@pytest.mark.parametrize("ranks", ["two_ranks", "three_ranks"])
def test_ranks_that_fail_in_turn_agree_bit_for_bit(ranks, request):
    ranks = request.getfixturevalue(ranks)
    outcomes = ranks.run(train_with_failures, ranks.num_ranks, 8, 0)
    (first, num_events), *others = outcomes
    assert num_events == 7
    for other, _ in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


def train_where_one_image_fits_in_no_way(rank):
    trainer = trainer_on(rank)
    if rank == 1:
        trainer.injector = Injector(range(10**6))
    return error_of(trainer)


def error_of(trainer):
    with pytest.raises(OutOfMemoryError) as e:
        iterate(trainer)
    return str(e.value)


def test_the_last_error_is_raised_on_every_rank(two_ranks):
    first, second = two_ranks.run(train_where_one_image_fits_in_no_way)
    assert first == second
    assert "on rank 1, with a micro-batch of 1" in first
    assert "image_2.png" in first


def fail_at_the_end(rank):
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            error = torch.OutOfMemoryError("CUDA out of memory")
            patch.setattr(WindowRetries, "end_window", Mock(side_effect=error))
        return error_of(trainer_on(rank))


def test_all_ranks_hear_of_an_end_that_fails_on_one(two_ranks):
    first, second = two_ranks.run(fail_at_the_end)
    assert first == second
    assert "in the window of iteration 0 on rank 1" in first


def sizes_after_resuming(rank, state):
    trainer = trainer_on(rank)
    trainer.load_state_dict(state)
    return trainer.cutter.images


def recovery_state_after_a_failure(rank):
    trainer = trainer_on(rank)
    trainer.injector = Injector([5] if rank == 1 else [])
    iterate(trainer)
    trainer.gather_states()
    trainer.state_dict()  # of a checkpoint before, after the same iteration
    return trainer.state_dict()


def test_each_rank_resumes_the_size_that_it_has_learned(two_ranks):
    state, _ = two_ranks.run(recovery_state_after_a_failure)  # the first rank writes checkpoints
    assert two_ranks.run(sizes_after_resuming, state) == [None, 1]


@patch("d2_memfit.engine.retry.MAX_SKIPPED", 1.0)
def train_without_images_on_one_rank(rank):
    trainer = trainer_on(rank, 2, last_resort="skip")
    trainer.injector = Injector(range(10**6) if rank == 1 else [])
    storage = iterate(trainer)
    assert rank or storage.latest()["effective_batch"][0] == NUM_IMAGES
    return parameters(trainer.model.module)


def test_a_rank_whose_images_were_all_skipped_takes_the_others_step(two_ranks):
    first, second = two_ranks.run(train_without_images_on_one_rank)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert relative_difference(first, parameters(proposal_network())) > 0
