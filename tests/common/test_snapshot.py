# Copyright (c) the d2_memfit developers.
"""A forward that is run again begins with the state of its model, of whatever kind that is."""

import copy
import itertools
import random
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from injection import iterate

from d2_memfit import AccumulatingTrainer
from d2_memfit.common.snapshot import Snapshot, changed_by_forward, state_of
from d2_memfit.config.settings import NormalizerOptions, RecoveryOptions


class Counting:
    __slots__ = ()

    def __init__(self):
        self.count = 0
        self.seen = []

    def change(self):
        self.count += 1
        self.seen.append(self.count)


class Meter(Counting):
    """Its attributes are in its dict."""


class Slotted(Counting):
    __slots__ = ("count", "later", "seen")

    def change(self):
        super().change()
        self.later = 1

    def __str__(self):
        return f"{self.count} {self.seen} {hasattr(self, 'later')}"


class Model(torch.nn.Module):
    """Memory runs out at the end of some forwards, after their change of the state."""

    def __init__(self, state, change, before_change, fails_in=(0,)):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        self.teacher = torch.nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("queue", None)
        self.state = state
        self.change = lambda: change(self)
        forwards = itertools.count()

        def end_forward():
            if next(forwards) in fails_in:
                raise torch.OutOfMemoryError("CUDA out of memory")

        self.begin_forward, self.end_forward = lambda: before_change(self), end_forward

    def forward(self, batch):
        self.begin_forward()
        self.change()
        self.end_forward()
        return {"loss": self.weight.sum() * len(batch)}


def train(state, change, look, num_iterations=1, fails_in=(0,), model=Model, policy="off"):
    """Returns what ``look(model)`` was in the beginning of each forward."""
    seen = []
    model = model(state, change, lambda model: seen.append(str(look(model))), fails_in)
    batches = [[{"image_id": 2 * i}, {"image_id": 2 * i + 1}] for i in range(num_iterations)]
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    options = {"recovery": RecoveryOptions(), "normalizers": NormalizerOptions(policy)}
    iterate(AccumulatingTrainer(model, batches, optimizer, **options), num_iterations)
    return seen


def ema(model):
    """As MoCo and others write it: PyTorch does not count this change."""
    model.teacher.weight.data = model.teacher.weight.data * 0.9 + 0.1


KINDS = {
    "list": ([1], lambda m: m.state.append(2), lambda m: m.state),
    "deque": (deque([1, 2], maxlen=2), lambda m: m.state.append(3), lambda m: m.state),
    "dict": ({"a": 1}, lambda m: m.state.update(a=2, b=3), lambda m: m.state),
    "defaultdict": (defaultdict(int), lambda m: m.state["a"], lambda m: dict(m.state)),
    "set": ({1}, lambda m: m.state.add(2), lambda m: m.state),
    "list in a dict": ({"a": [1]}, lambda m: m.state["a"].append(2), lambda m: m.state),
    "list in a tuple": (([1], 2), lambda m: m.state[0].clear(), lambda m: m.state),
    "number": (1, lambda m: setattr(m, "state", 2), lambda m: m.state),
    "no attribute": (0, lambda m: setattr(m, "cache", []), lambda m: hasattr(m, "cache")),
    "slots": (Slotted(), lambda m: m.state.change(), lambda m: str(m.state)),
    "array": (np.zeros(2), lambda m: np.add(m.state, 1, out=m.state), lambda m: m.state),
    "array.array": (array("i", [1]), lambda m: m.state.append(2), lambda m: m.state),
    "tensor": (torch.zeros(2), lambda m: m.state.add_(1), lambda m: m.state),
    "torch.Generator": (
        torch.Generator().manual_seed(0),
        lambda m: torch.rand(2, generator=m.state),
        lambda m: m.state.get_state().sum(),
    ),
    "np.random.Generator": (
        np.random.default_rng(0),
        lambda m: m.state.random(),
        lambda m: m.state.bit_generator.state,
    ),
    "np.random.RandomState": (
        np.random.RandomState(0),
        lambda m: m.state.rand(),
        lambda m: m.state.get_state()[2],
    ),
    "random.Random": (
        random.Random(0),
        lambda m: m.state.random(),
        lambda m: m.state.getstate()[1][-1],
    ),
    "object": (Meter(), lambda m: m.state.change(), lambda m: vars(m.state)),
    "buffer": (0, lambda m: setattr(m, "queue", torch.ones(2)), lambda m: m.queue),
    "frozen parameter": (0, ema, lambda m: m.teacher.weight.data),
    "parameter": (0, lambda m: m.teacher.weight.data.mul_(0.9), lambda m: m.teacher.weight.data),
    "hidden module": (
        [torch.nn.Linear(2, 2).requires_grad_(False)],
        lambda m: setattr(m.state[0], "steps", 1) or m.state[0].register_buffer("b", None),
        lambda m: (hasattr(m.state[0], "steps"), hasattr(m.state[0], "b")),
    ),
}


@pytest.fixture(params=KINDS)
def kind(request):
    """A state of its own for each test: runs change it."""
    return copy.deepcopy(KINDS[request.param])


def test_state_is_as_before_when_a_forward_is_run_again(kind):
    first, again, after = train(*kind)
    assert again == first
    assert after != first, "the change of the forward that did not fail stays"


def test_state_is_as_before_after_a_test_of_what_losses_are_divided_by(kind):
    first, *_, again, _ = train(*kind, policy="window")
    assert again == first


def test_weights_that_forwards_change_are_put_back_in_later_windows_too():
    """The second forward of a window tells which ones: here that of the first one's halves."""
    _, change, look = KINDS["parameter"]
    *_, first, again, _ = train(0, change, look, num_iterations=2, fails_in=(0, 3))
    assert again == first


def test_the_random_generators_are_put_back():
    def drawn():
        return random.random(), np.random.rand(), torch.rand(1).item()

    before = Snapshot(torch.nn.Linear(1, 1))
    first = drawn()
    before.restore()
    assert drawn() == first


def test_large_tensors_that_a_forward_replaces_are_not_kept():
    kept = []

    def change(model):
        model.state = torch.zeros(2**19)
        kept.append(weakref.ref(model.state))

    alive = []

    def look(model):
        alive.append(sum(r() is not None for r in kept))

    train(torch.zeros(2**19), change, look, num_iterations=6, fails_in=())
    assert max(alive) == 1


class KeepsItself(Model):
    def save_for_retry(self):
        return list(self.state)

    def restore_for_retry(self, state):
        self.state = [*state, "restored"]


def test_a_module_can_save_and_restore_its_own():
    seen = train([1], lambda m: m.state.append(2), lambda m: m.state, model=KeepsItself)
    assert seen == ["[1]", "[1, 'restored']", "[1, 'restored', 2]"]


def test_what_is_part_of_a_graph_is_left_alone():
    kept = []

    def change(model):
        model.state = {"loss": model.weight.sum()}
        kept.append(model.state)

    train({}, change, lambda m: 0, num_iterations=2, fails_in=[1])


def test_orders_and_buffers_are_put_back_and_a_list_may_contain_itself():
    model = torch.nn.Linear(1, 1)
    model.order, model.bytes = OrderedDict(a=1, b=2), bytearray(b"ab")
    model.numbers = [torch.ones(2000)]
    model.numbers.append(model.numbers)
    before, snapshot = state_of(model), Snapshot(model)
    model.order.move_to_end("a")
    model.bytes[0] = 0
    model.numbers[0][1000] = 2
    changed, _ = changed_by_forward(before, state_of(model))
    assert changed == ["Linear.order", "Linear.bytes", "Linear.numbers"]
    snapshot.restore()
    assert changed_by_forward(before, state_of(model)) == ([], [])


def test_a_chain_of_objects_may_be_long():
    model = torch.nn.Linear(1, 1)
    model.first = last = Meter()
    for _ in range(2000):
        last.next = Meter()
        last = last.next
    snapshot = Snapshot(model)
    last.change()
    snapshot.restore()
    assert (last.count, last.seen) == (0, [])


def test_a_module_is_put_back_though_something_after_it_in_its_attribute_cannot_be():
    model, teacher = torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(2)
    model.hidden = {"teacher": (teacher,), "queue": torch.zeros(2**19)}
    before, snapshot = state_of(teacher), Snapshot(model)
    teacher(torch.ones(2, 2))
    teacher.momentum = 0.5
    snapshot.restore()
    assert changed_by_forward(before, state_of(teacher)) == ([], [])
    assert (teacher.momentum, teacher.running_mean.tolist()) == (0.1, [0, 0])
