# Copyright (c) the d2_memfit developers.
"""Leaks, and healthy runs, in real training on the CPU."""

import ctypes
import gc
import itertools
import json
import random
import re
import sys
from collections import deque
from typing import ClassVar

import numpy as np
import pytest
import torch
from detectron2.engine import HookBase
from monitored import GROWTH, batches, cheap_trainer, make_trainer
from tiny import ROOT, images, run_process
from torch.utils.data import DataLoader

from d2_memfit.engine.hooks import LeakDetector, MemorySnapshot

pytestmark = pytest.mark.slow

KIB = 2**10
GLOBAL_LIST: list = []
GLOBAL_DICT: dict = {}


@pytest.fixture(autouse=True)
def no_garbage():
    """What other tests left in cycles is not freed while a leak is looked for."""
    gc.collect()
    yield
    gc.enable()
    gc.freeze()  # again, as in conftest.py


class Leaky(HookBase):
    kept_by_class: ClassVar[list] = []

    def __init__(self, leak):
        self.kept = []
        self.queue = deque()
        self.by_iteration = {}
        self.text = ""
        self.numbers = np.zeros(0)
        self.after_step = lambda: leak(self)


def keeps(what):
    return lambda hook: hook.kept.append(what())


def native(num_bytes):
    """As a library in C that does not free."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    return lambda hook: ctypes.memset(ctypes.c_void_p(libc.malloc(num_bytes)), 1, num_bytes)


def graph(hook):
    x = torch.ones(25 * KIB, requires_grad=True)
    hook.kept.append((x * 2).exp().sum())


def closure():
    kept = []
    return lambda hook: kept.append(np.ones(4 * KIB))


# Bytes per iteration, and what leaks them.
LEAKS = {
    "10 KiB tensors": (10 * KIB, keeps(lambda: torch.ones(2560))),
    "100 KiB tensors": (100 * KIB, keeps(lambda: torch.ones(25600))),
    "5 MiB tensors": (5 * KIB**2, keeps(lambda: torch.ones(5 * KIB**2 // 4))),
    "10 KiB arrays": (10 * KIB, keeps(lambda: np.ones(1280))),
    "1 MiB arrays in a deque": (KIB**2, lambda hook: hook.queue.append(np.ones(KIB**2 // 8))),
    "20 KiB bytes in a global list": (20 * KIB, lambda _: GLOBAL_LIST.append(bytes(20 * KIB))),
    "30 KiB bytes in a global dict": (
        30 * KIB,
        lambda _: GLOBAL_DICT.__setitem__(len(GLOBAL_DICT), bytes(30 * KIB)),
    ),
    "arrays in a list of a class": (
        32 * KIB,
        lambda hook: hook.kept_by_class.append(np.ones(4 * KIB)),
    ),
    "arrays by iteration": (
        16 * KIB,
        lambda hook: hook.by_iteration.update({hook.trainer.iter: np.ones(2 * KIB)}),
    ),
    "arrays of a closure": (32 * KIB, closure()),
    "an array that grows": (
        16 * KIB,
        lambda hook: setattr(hook, "numbers", np.append(hook.numbers, np.ones(2 * KIB))),
    ),
    "a text that grows": (
        16 * KIB,
        lambda hook: setattr(hook, "text", hook.text + "x" * 16 * KIB),
    ),
    "small strings": (10 * KIB, keeps(lambda: [f"{i:0350d}" for i in range(26)])),
    "small dicts": (14 * KIB, keeps(lambda: [{"a": 0} for _ in range(64)])),
    "floats": (8 * KIB, keeps(lambda: [i / 3 for i in range(1000)])),
    "a graph": (200 * KIB, graph),
    "malloc of a library": (64 * KIB, native(64 * KIB)),
}
TENSORS = {
    "10 KiB tensors": "float32 [2560] on cpu (",
    "100 KiB tensors": "float32 [25600] on cpu (",
    "5 MiB tensors": "float32 [1310720] on cpu (",
    "a graph": "float32 [] on cpu (",
}


@pytest.mark.parametrize(
    "leak",
    [
        "small dicts",
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in LEAKS if n != "small dicts"),
    ],
)
def test_a_planted_leak_is_found_within_500_iterations_with_the_holder_of_its_tensors(leak, log):
    num_bytes, hook = LEAKS[leak]
    trainer = cheap_trainer()
    trainer.register_hooks([Leaky(hook), LeakDetector()])
    trainer.train(0, 500)
    (warning,) = warnings(log)
    growth = re.search(r"grows by ([\d.]+) MB per 1000", warning)
    if growth:
        assert float(growth[1]) == pytest.approx(num_bytes * 1000 / 2**20, rel=0.25)
    if leak in TENSORS:
        assert TENSORS[leak] in warning
        assert "held by: Leaky (" in warning


def run_monitored(*args):
    """Output of a training in a process of its own, where no convolution has run before."""
    command = [sys.executable, "-W", "ignore", ROOT / "tests" / "monitored.py", *args]
    result = run_process(command, timeout_s=1200)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.mark.exhaustive
def test_a_leak_in_the_loaders_workers_is_found():
    # In a process of its own: a fork of this one has free memory that the leak would fill first.
    output = run_monitored("leaky")
    growth = re.search(r"memory of the data loader's workers grows by ([\d.]+) MB", output)
    assert float(growth[1]) == pytest.approx(1000, rel=0.25)


def warnings(log):
    return sorted({r.getMessage() for r in log.records if "grow" in r.getMessage()})


def test_a_leak_of_100_kb_is_found_with_its_holder(log):
    trainer = cheap_trainer()
    trainer.register_hooks([Leaky(LEAKS["100 KiB tensors"][1]), LeakDetector(window=100)])
    trainer.train(0, 200)
    (warning,) = warnings(log)
    per_1000 = float(re.search(r"grows by ([\d.]+) MB per 1000", warning)[1])
    assert per_1000 == pytest.approx(97.7, rel=0.1)
    assert "float32 [25600] on cpu" in warning
    assert "held by: Leaky (" in warning


@pytest.mark.parametrize("leak", ["10 KiB arrays", "20 KiB bytes in a global list", "floats"])
def test_what_is_no_tensor_is_found_in_a_short_window(leak, log):
    trainer = cheap_trainer()
    trainer.register_hooks([Leaky(LEAKS[leak][1]), LeakDetector(window=100)])
    trainer.train(0, 200)
    assert len(warnings(log)) == 1


def test_a_leak_in_the_loader_is_told_from_hooks(log, tmp_path):
    class Loader:
        def __init__(self):
            self.kept = []

        def __iter__(self):
            while True:
                self.kept.append(torch.zeros(25601))
                yield torch.ones(2, 8)

    trainer = cheap_trainer(Loader())
    trainer.register_hooks([MemorySnapshot(str(tmp_path)), LeakDetector(window=100)])
    trainer.train(0, 200)
    (warning,) = warnings(log)
    assert "float32 [25601] on cpu" in warning
    assert "held by: the data loader (" in warning


ALARM = re.compile(r"grows? by .* per (?:1000 iterations|iteration), over the last")
LOADERS = {
    "no workers": {"eval_period": 20, "family": "mask_rcnn"},
    "2 workers": {"num_workers": 2, "family": "retinanet"},
    "2 workers, file_system": {"num_workers": 2, "sharing": "file_system", "eval_period": 20},
    "4 workers": {"num_workers": 4, "eval_period": 20, "family": "mask_rcnn"},
    "2 ranks": {"num_ranks": 2, "num_workers": 1},
}


def alarms_of_a_detector(coins, tmp_path, **options):
    return ALARM.findall(run_monitored("healthy", coins, tmp_path, json.dumps(options)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("growth", GROWTH)
@pytest.mark.parametrize("window", [50, 100])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_healthy_run_with_evaluations_raises_no_alarm(loader, window, growth, coins, tmp_path):
    options = {**LOADERS[loader], "window": window, "growth": growth, "seed": window}
    assert not alarms_of_a_detector(coins, tmp_path, **options)


@pytest.mark.long
@pytest.mark.parametrize(("kept_kib", "num_iterations"), [(0, 500), (16, 150)])
def test_a_run_with_evaluations_raises_an_alarm_if_it_leaks(
    kept_kib, num_iterations, coins, tmp_path
):
    options = {"kept_kib": kept_kib, "num_iterations": num_iterations, "growth": "late"}
    alarms = alarms_of_a_detector(coins, tmp_path, window=50, **LOADERS["2 workers"], **options)
    assert bool(alarms) == bool(kept_kib)


def drop_in_a_cycle(_):
    """Garbage of 16 KiB and 500 objects, which is there until Python collects it."""
    garbage = [np.ones(2 * KIB), [i / 3 for i in range(500)]]
    garbage.append(garbage)


@pytest.mark.parametrize("leak", [None, "10 KiB arrays"])
def test_garbage_in_cycles_is_no_leak_and_hides_none(leak, log):
    gc.disable()  # the garbage of large programs stays as long: Python seldom looks at old objects
    trainer = cheap_trainer()
    trainer.register_hooks([Leaky(drop_in_a_cycle), LeakDetector(window=100)])
    if leak:
        trainer.register_hooks([Leaky(LEAKS[leak][1])])
    trainer.train(0, 350)
    growths = re.findall(r"grows by ([\d.]+) MB per 1000", "".join(warnings(log)))
    assert [float(growth) for growth in growths] == ([pytest.approx(10, rel=0.1)] if leak else [])


@pytest.mark.parametrize("begins_at", [50, 250])
def test_a_leak_of_8_kib_is_found_within_two_windows(begins_at, log):
    def leak(hook):
        if hook.trainer.iter >= begins_at:
            hook.kept.append(bytes(8 * KIB))

    trainer = cheap_trainer()
    trainer.register_hooks([Leaky(leak), LeakDetector()])
    trainer.train(0, begins_at + 800)
    assert len(warnings(log)) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["proposal_network", "mask_rcnn", "retinanet"])
def test_a_healthy_run_of_2000_iterations_raises_no_alarm(family, log):
    trainer = make_trainer(batches(), family, fpn=True)
    trainer.register_hooks([LeakDetector()])
    trainer.train(0, 2000)
    assert not warnings(log)


class Images(torch.utils.data.IterableDataset):
    """As a healthy mapper: each batch is made anew, and has another size."""

    def __iter__(self):
        for i in itertools.count():
            yield np.random.rand(2, 8 + 4000 * (i % 5)).astype("float32")


def first_columns(arrays):
    return torch.stack([torch.from_numpy(a)[:, :8] for a in arrays]).flatten(0, 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_healthy_loader_raises_no_alarm(num_workers, log):
    loader = DataLoader(Images(), 2, num_workers=num_workers, collate_fn=first_columns)
    trainer = cheap_trainer(loader)
    trainer.register_hooks([LeakDetector()])
    trainer.train(0, 2000)
    assert not warnings(log)


def test_a_healthy_run_raises_no_alarm(log):
    trainer = make_trainer(batches())
    trainer.register_hooks([LeakDetector(window=50)])
    trainer.train(0, 150)
    assert not warnings(log)


def growing_images(num_iterations):
    """Images of random sizes, the largest of which grow for the first half of a run."""
    rng = random.Random(1)
    for i in itertools.count():
        limit = 40 + 2 * min(44, i * 88 // num_iterations)
        yield images(2, i, size=rng.randrange(32, limit, 2), num_instances=3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("window", [50, 100])
def test_a_healthy_run_of_growing_images_raises_no_alarm(window, log):
    trainer = make_trainer(growing_images(600), fpn=True)
    trainer.register_hooks([LeakDetector(window=window)])
    trainer.train(0, 600)
    assert not warnings(log)


def test_memory_that_grows_with_the_images_is_no_leak(log):
    def keep_the_largest(hook):
        hook.numbers = np.ones(2 * KIB * (hook.trainer.iter + 1))

    loader = (torch.ones(2 + i, 8) for i in itertools.count())
    trainer = cheap_trainer(loader)
    trainer.register_hooks([Leaky(keep_the_largest), LeakDetector(window=100)])
    trainer.train(0, 400)
    assert not warnings(log)


def test_a_leak_is_found_once_images_have_grown(log):
    def loader():
        for i in itertools.count():
            yield torch.ones(2 + min(i, 100), 8)

    trainer = cheap_trainer(loader())
    trainer.register_hooks([Leaky(LEAKS["100 KiB tensors"][1]), LeakDetector(window=100)])
    trainer.train(0, 300)
    warning, *_ = warnings(log)  # the tensors' Python objects may be next
    assert "held by: Leaky (" in warning
