# Copyright (c) the d2_memfit developers.
"""Iterations on several ranks."""

import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from injection import iterate
from tiny import every_anchor_counts, images, parameters, relative_difference, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer
from d2_memfit.common import compat
from d2_memfit.config.settings import NormalizerOptions
from d2_memfit.engine import ranks as reduce

NUM_ITERATIONS = 5


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


run = partial(iterate, num_iterations=NUM_ITERATIONS)


def proposal_network():
    return tiny_model(every_anchor_counts(tiny_cfg("proposal_network", fpn=False)))


def batches(iteration, sizes_of_ranks):
    """The iteration's 8 images, cut into each rank's micro-batches."""
    all_images = iter(images(8, first=8 * iteration))
    return [[[next(all_images) for _ in range(n)] for n in sizes] for sizes in sizes_of_ranks]


def train_on_rank(rank, sizes_of_ranks):
    model = compat.create_ddp_model(proposal_network(), broadcast_buffers=False)
    loader = [b for i in range(NUM_ITERATIONS) for b in batches(i, sizes_of_ranks)[rank]]
    steps = len(sizes_of_ranks[rank])
    storage = run(AccumulatingTrainer(model, loader, sgd(model), steps))
    metrics = {}
    if rank == 0:
        metrics = {k: [v for v, _ in h.values()] for k, h in storage.histories().items()}
    return parameters(model.module), metrics


@pytest.mark.parametrize(
    "sizes_of_ranks",
    [
        pytest.param([[3, 2], [2, 1]], id="5+3"),
        pytest.param([[1, 2], [1, 1], [2, 1]], id="3+2+3"),
        pytest.param([[4], [4]], id="one-forward"),
    ],
)
def test_ranks_step_as_one_process_with_the_full_batch(sizes_of_ranks, request):
    ranks = request.getfixturevalue("two_ranks" if len(sizes_of_ranks) == 2 else "three_ranks")
    full = proposal_network()
    before = parameters(full)
    expected = run(
        AccumulatingTrainer(full, [images(8, 8 * i) for i in range(NUM_ITERATIONS)], sgd(full))
    )
    (actual, metrics), *others = ranks.run(train_on_rank, sizes_of_ranks)
    moved = relative_difference(parameters(full), before)
    assert moved > 1e-4
    assert relative_difference(actual, parameters(full)) < 1e-5 * moved
    for other, _ in others:
        assert all(torch.equal(other[name], actual[name]) for name in actual)
    losses = [v for v, _ in expected.history("total_loss").values()]
    assert metrics["total_loss"] == pytest.approx(losses, rel=1e-5)
    assert metrics["effective_batch"] == [8] * NUM_ITERATIONS


class Lopsided(torch.nn.Module):
    """Its parameters: one that all images use, one that odd images use, one that none uses."""

    def __init__(self):
        super().__init__()
        self.always = torch.nn.Parameter(torch.ones(2))
        self.odd = torch.nn.Parameter(torch.ones(2))
        self.never = torch.nn.Parameter(torch.ones(2))

    def forward(self, batch):
        numbers = [image["number"] for image in batch]
        loss = sum(n * self.always.sum() for n in numbers)
        return {"loss": (loss + sum(n * self.odd.sum() for n in numbers if n % 2)) / len(batch)}


def numbers(*values):
    return [{"number": n} for n in values]


def train_on_numbers(kind):
    """Weights of one process that has the images of both ranks."""
    full = kind()
    run(AccumulatingTrainer(full, [numbers(2, 4, 6, 1, 3, 5)] * NUM_ITERATIONS, sgd(full)))
    return parameters(full)


def train_on_numbers_of_rank(rank, kind, bucket_bytes=2**20):
    model = compat.create_ddp_model(kind())
    loader = [[numbers(2), numbers(4, 6)], [numbers(1), numbers(3, 5)]][rank] * NUM_ITERATIONS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce, "_BUCKET_BYTES", bucket_bytes)
        run(AccumulatingTrainer(model, loader, sgd(model), 2))
    return parameters(model.module), [p.grad is None for p in model.parameters()]


def test_parameters_that_a_rank_or_all_ranks_do_not_use(two_ranks):
    full = train_on_numbers(Lopsided)
    for actual, without_gradient in two_ranks.run(train_on_numbers_of_rank, Lopsided):
        assert relative_difference(actual, full) < 1e-6
        assert without_gradient == [False, False, True]
        assert actual["never"].tolist() == [1.0, 1.0]  # weight decay leaves it alone too


class Waiting(torch.nn.Module):
    """Rank 1 starts its first forward only when rank 0 is done with its last backward."""

    def __init__(self, rank, flag):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.rank, self.flag, self.backwards = rank, Path(flag), 0
        self.weight.register_hook(self.count)

    def forward(self, batch):
        while self.rank == 1 and not self.flag.exists():
            time.sleep(0.01)
        return {"loss": self.weight * len(batch)}

    def count(self, gradient):
        self.backwards += 1
        if self.rank == 0 and self.backwards == 3:
            self.flag.touch()


def train_waiting(rank, flag):
    """Names of the collectives, and how many backwards were done when each was called."""
    module = Waiting(rank, flag)
    model = compat.create_ddp_model(module, broadcast_buffers=False)
    off = NormalizerOptions("off")  # its test would wait, too
    loader = [numbers(i) for i in range(3)]
    trainer = AccumulatingTrainer(model, loader, sgd(model), 3, normalizers=off)
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "gather"):
            original = getattr(dist, name)

            def recorded(*args, original=original, **kwargs):
                calls.append((original.__name__, module.backwards))
                return original(*args, **kwargs)

            patch.setattr(dist, name, recorded)
        iterate(trainer, 1)
    return calls


def test_no_rank_waits_before_its_last_backward_and_gradients_are_reduced_once(two_ranks, tmp_path):
    for calls in two_ranks.run(train_waiting, str(tmp_path / "flag")):
        assert {backwards for _, backwards in calls} == {3}
        names = [name for name, _ in calls]  # of the vote, and of the gradients
        assert names.count("all_reduce") == 1
        assert names[-1] == "all_reduce"


class Mixed(torch.nn.Module):
    """Parameters of two types and several sizes, one laid out otherwise than it is indexed."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.parameters_ = torch.nn.ParameterList(
            torch.rand(shape, generator=generator).to(dtype).to(memory_format=layout)
            for shape, dtype, layout in (
                ((5, 3), torch.float32, torch.contiguous_format),
                ((4, 3, 2, 2), torch.float32, torch.channels_last),
                ((7,), torch.float64, torch.contiguous_format),
                ((2, 2), torch.float32, torch.contiguous_format),
                ((300,), torch.float32, torch.contiguous_format),
            )
        )

    def forward(self, batch):
        factor = sum(image["number"] for image in batch) / len(batch)
        return {"loss": sum((p * p).sum() for p in self.parameters_).float() * factor}


@pytest.mark.parametrize("bucket_bytes", [1, 100, 2**20])
def test_all_buckets_are_reduced(two_ranks, bucket_bytes):
    full = train_on_numbers(Mixed)
    for actual, _ in two_ranks.run(train_on_numbers_of_rank, Mixed, bucket_bytes):
        for name, expected in full.items():
            assert torch.allclose(actual[name], expected, rtol=1e-5), name


def train_on_nan(rank):
    model = compat.create_ddp_model(Lopsided())
    nan = float("nan")
    loader = [[{"value": 1.0, "file_name": f"rank{rank}.png", "image_id": rank}]]
    model.module.forward = lambda batch: {"loss": model.module.always.sum() * (nan if rank else 1)}
    trainer = AccumulatingTrainer(model, loader * 2, sgd(model), 2)
    with pytest.raises(FloatingPointError) as e:
        iterate(trainer, 1)
    return str(e.value), model.module.always.tolist()


def test_a_loss_that_is_not_finite_on_one_rank_raises_on_all(two_ranks):
    for message, weights in two_ranks.run(train_on_nan):
        assert "rank 1: loss nan on the images rank1.png (image_id 1)" in message
        assert "rank0.png" not in message
        assert weights == [1.0, 1.0]
