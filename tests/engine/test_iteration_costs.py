# Copyright (c) the d2_memfit developers.
"""What an iteration does in addition to Detectron2's: operations are counted, not seconds."""

import pickle
from collections import Counter

import pytest
import torch
from detectron2.engine import SimpleTrainer
from detectron2.utils import comm
from detectron2.utils.events import EventStorage

from d2_memfit import AccumulatingTrainer, compat
from d2_memfit.compat.pytorch import TorchDispatchMode
from d2_memfit.engine.collectives import noticed_collectives
from d2_memfit.settings import RecoveryOptions

COPIES = ("clone", "copy_", "_to_copy", "_foreach_copy_")


class Layers(torch.nn.Module):
    """Linear layers, buffers that never change, and two losses."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(5)])
        for i in range(7):
            self.register_buffer(f"frozen{i}", torch.zeros(4))

    def forward(self, batch):
        x = self.layers(batch)
        return {"loss_a": x.mean(), "loss_b": x.square().mean()}


class WithStatistics(Layers):
    """Three buffers change in each forward; PyTorch counts the changes of one."""

    def __init__(self):
        super().__init__()
        self.layers.append(torch.nn.BatchNorm1d(4))


class CountedOperators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def counted(make_trainer, monkeypatch, model=Layers):
    """Operators, and pickled objects, of the sixth iteration."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    trainer = make_trainer(net, [torch.ones(2, 4)] * 99, optimizer)
    pickled = []
    with EventStorage(), monkeypatch.context() as patch:
        for iteration in range(6):  # in some of the first ones, state is compared with its copies
            if iteration == 5:
                patch.setattr(pickle, "dumps", lambda *args: pickled.append(args))
            with CountedOperators() as operators:
                trainer.run_step()
    return operators.names, len(pickled)


def copies(names):
    return sum(number for name, number in names.items() if name in COPIES)


@pytest.mark.parametrize(("model", "num"), [(Layers, 0), (WithStatistics, 3)])
def test_with_default_keys_only_state_that_changes_is_copied(model, num, monkeypatch):
    """Also, no operator is used that Detectron2 does not use, but for the loss's weight."""
    plain, _ = counted(SimpleTrainer, monkeypatch, model)
    ours, num_pickled = counted(AccumulatingTrainer, monkeypatch, model)
    assert copies(ours) - copies(plain) == num
    assert num_pickled == 0
    more = {k: n - plain[k] for k, n in ours.items() if n > plain[k] and k not in COPIES}
    assert set(more) <= {"mul", "detach"}, more


@pytest.mark.parametrize(("model", "num"), [(Layers, 0), (WithStatistics, 3)])
def test_with_recovery_each_micro_batch_copies_what_changes(model, num, monkeypatch):
    def recovering(*args):
        return AccumulatingTrainer(*args, 2, recovery=RecoveryOptions())

    plain, _ = counted(SimpleTrainer, monkeypatch, model)
    ours, num_pickled = counted(recovering, monkeypatch, model)
    starts = 3  # of the iteration and of two micro-batches
    assert copies(ours) - copies(plain) <= starts * num
    assert num_pickled == 0


def collectives_on_a_rank(rank, kind):
    """The collectives of each of six iterations, without those of DDP's backward."""
    net = compat.create_ddp_model(Layers(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    steps = {"plain": (), "ours": (), "accumulated": (2,)}[kind]
    trainer = (SimpleTrainer if kind == "plain" else AccumulatingTrainer)(
        net, [torch.ones(2, 4)] * 99, optimizer, *steps
    )
    found = []

    def note(call):
        found[-1].append((call.name, sum(t.numel() for t in call.tensors)))
        return False

    with EventStorage():
        for _ in range(6):
            found.append([])
            with noticed_collectives(note):
                trainer.run_step()
    return found


def test_ranks_exchange_small_tensors_and_no_objects(two_ranks):
    plain = two_ranks.run(collectives_on_a_rank, "plain")[0][-1]
    assert len(plain) >= 2  # Detectron2 gathers pickled metrics
    ours = two_ranks.run(collectives_on_a_rank, "ours")[0]
    assert len(ours[0]) > 2  # the names of the losses are not known yet
    assert [name for name, _ in ours[-1]] == ["all_reduce", "all_reduce"]  # images, vote
    assert all(size <= 32 for _, size in ours[-1])
    accumulated = two_ranks.run(collectives_on_a_rank, "accumulated")[0]
    assert [name for name, _ in accumulated[-1]] == ["all_reduce", "all_reduce"]  # vote, gradients


def states_on_a_rank(rank):
    """The random states that this rank knows of all, after four iterations, and the true ones."""
    net = Layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = AccumulatingTrainer(net, [torch.ones(2, 4)] * 99, optimizer, 2)
    with EventStorage() as storage:
        for storage.iter in range(4):
            torch.rand(rank + storage.iter)
            trainer.run_step()
        expected = comm.all_gather(torch.get_rng_state())
        if rank == 1:
            torch.rand(100)
        states = trainer.run_state.state_dict(3)["ranks"]
    return [None if s is None else s["random_states"]["torch"] for s in states], expected


def test_the_first_rank_has_the_random_states_of_all_without_a_gathering(two_ranks):
    (states, expected), _ = two_ranks.run(states_on_a_rank)
    assert all(torch.equal(a, b) for a, b in zip(states, expected))
