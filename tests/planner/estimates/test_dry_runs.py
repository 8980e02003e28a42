# Copyright (c) the d2_memfit developers.
"""Dry runs that are made once."""

import pickle
import zlib
from dataclasses import asdict

import numpy as np
import pytest
import torch
from tiny import tiny_cfg

from d2_memfit.job import Job, WorstCase
from d2_memfit.planner.device import DeviceModel
from d2_memfit.planner.dry_run import Timeline
from d2_memfit.planner.estimates import DryJob, DryRuns
from d2_memfit.planner.search import plan_memory

CUDA = DeviceModel.load("cuda")


class Counted(DryRuns):
    made = 0

    def __call__(self, step, *args):
        def counted(*args):
            self.made += 1
            return step(*args)

        counted.__name__ = step.__name__
        return super().__call__(counted, *args)


def estimate(job, runs=None):
    return asdict(DryJob(job, CUDA, runs=runs).estimate(with_range=True))


@pytest.mark.parametrize("kind", ["mask_rcnn", "retinanet"])
def test_what_was_made_before_says_the_same(kind):
    job = Job.from_cfg(tiny_cfg(kind))
    runs = Counted()
    first = estimate(job, runs)
    made = runs.made
    assert made > 1
    again = Counted(runs.kept)
    assert estimate(job, again) == first == estimate(job)
    assert again.made == 0


@pytest.mark.slow
def test_plans_of_other_budgets_share_dry_runs():
    cfg = tiny_cfg("retinanet", fpn=False)
    cfg.SOLVER.IMS_PER_BATCH = 4
    job = Job.from_cfg(cfg, 1, batch=WorstCase((320, 480), 20))
    needs_gb = DryJob(job, CUDA).total_bytes() / 2**30
    runs = Counted()
    made = []
    for share in (0.97, 0.95):
        before = runs.made
        plan = plan_memory(job, share * needs_gb, allow=["exact"], device="cuda", runs=runs)
        alone = plan_memory(job, share * needs_gb, allow=["exact"], device="cuda")
        assert asdict(plan) == asdict(alone)
        made.append(runs.made - before)
    assert made[1] < made[0] / 2


def a_batch(value=0):
    image = {"image": torch.full((3, 64, 64), value, dtype=torch.uint8), "height": 64, "width": 64}
    return [image]


@pytest.mark.parametrize(
    ("settings", "ranks", "batch", "flags", "is_same"),
    [
        ({}, 1, 0, (True, True), True),
        ({"MEMFIT.BUDGET_GB": 3.0, "MEMFIT.PLAN.RISK": 0.2}, 1, 0, (True, True), True),
        ({"MEMFIT.MICRO_BATCH": 1}, 1, 0, (True, True), False),
        ({"SOLVER.AMP.ENABLED": True}, 1, 0, (True, True), False),
        ({"MODEL.RESNETS.DEPTH": 18}, 1, 0, (True, True), False),
        ({}, 2, 0, (True, True), False),
        ({}, 1, 1, (True, True), False),
        ({}, 1, 0, (True, False), False),
    ],
)
def test_runs_are_the_same_if_all_that_they_depend_on_is(settings, ranks, batch, flags, is_same):
    cfg = tiny_cfg("retinanet")
    cfg.SOLVER.IMS_PER_BATCH = 2
    runs = DryRuns()

    def train(job, batch, *flags):
        return Timeline(notes=["made"])

    runs(train, Job.from_cfg(cfg, 1), a_batch(), True, True)
    runs(train, Job.from_cfg(cfg, ranks).with_settings(settings), a_batch(batch), *flags)
    assert len(runs.kept) == (1 if is_same else 2)


def test_a_step_of_another_name_is_another_run():
    job, runs = Job.from_cfg(tiny_cfg("retinanet")), DryRuns()
    for name in ("train", "evaluate"):

        def step(job, batch):
            return Timeline(notes=[step.__name__])

        step.__name__ = name
        assert runs(step, job, a_batch()).notes == [name]


class Harmful:
    def __reduce__(self):
        return eval, ("1 / 0",)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x00",
        zlib.compress(b"no pickle"),
        zlib.compress(pickle.dumps(Harmful())),
        zlib.compress(pickle.dumps(torch.nn.Linear)),
        zlib.compress(pickle.dumps({"a": 1})),
    ],
)
def test_what_is_no_timeline_is_made_again(data):
    job, runs = Job.from_cfg(tiny_cfg("retinanet")), DryRuns()

    def train(job, batch):
        return Timeline(notes=["made"])

    runs(train, job, a_batch())
    (key,) = runs.kept
    runs.kept[key] = data
    assert runs(train, job, a_batch()).notes == ["made"]
    assert runs.kept[key] != data


def a_circle():
    circle = Circle()
    circle.inner = circle
    return circle


class Circle:
    pass


@pytest.mark.parametrize(
    ("value", "is_kept"),
    [
        (torch.zeros(3, 5)[:, 4], True),
        (torch.zeros(1).expand(7), True),
        (torch.zeros(2, dtype=torch.bfloat16, requires_grad=True), True),
        (torch.zeros(0, 4), True),
        (np.zeros(3, dtype="datetime64[s]"), False),
        (torch.zeros(3).to_sparse(), False),
        (torch.zeros(3, device="meta"), False),
        (a_circle(), False),
    ],
)
def test_any_batch_is_run_and_kept_if_it_can_be_compared(value, is_kept):
    job, runs = Job.from_cfg(tiny_cfg("retinanet")), DryRuns()

    def train(job, batch):
        return Timeline(notes=["made"])

    assert runs(train, job, [{**a_batch()[0], "more": value}]).notes == ["made"]
    assert len(runs.kept) == is_kept


def test_what_lies_behind_addresses_is_compared():
    """Objects in an array, and functions, are not told apart by where they are in memory."""
    job, runs = Job.from_cfg(tiny_cfg("retinanet")), DryRuns()
    names = np.array(["a", None], dtype=object)
    functions = [lambda: 1, lambda: 2]

    def train(job, batch):
        return Timeline(notes=["made"])

    for name in ("b", "c", "b"):
        names[1] = name
        runs(train, job, [names])
    assert len(runs.kept) == 2
    for function in functions:
        runs(train, job, [function])
    assert len(runs.kept) == 4
