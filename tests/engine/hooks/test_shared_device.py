# Copyright (c) the d2_memfit developers.
"""Memory that other processes take during training, on the CPU: a cgroup's limit is lowered."""

import itertools
import logging
import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from detectron2.engine import HookBase
from forks import run_forked
from monitored import Linear, make_trainer
from tiny import images, tiny_cfg

from d2_memfit import AccumulatingTrainer
from d2_memfit.engine.hooks import job_hooks
from d2_memfit.engine.hooks.shared_device import MakeRoom
from d2_memfit.job import Job
from d2_memfit.memory import host
from d2_memfit.settings import RecoveryOptions

GB = 2**30


class Limits(HookBase):
    """Sets the limit of the cgroup, in bytes beyond what is in use, after some iterations."""

    def __init__(self, folder, limits):
        self._folder, self._limits = folder, limits
        self.sizes = []
        self.write(4 * GB)

    def write(self, free):
        (self._folder / "memory.max").write_text(f"{GB + free}\n")
        (self._folder / "memory.current").write_text(f"{GB}\n")

    def after_step(self):
        self.sizes.append(self.trainer.cutter.images)
        if self.trainer.iter in self._limits:
            self.write(self._limits[self.trainer.iter])


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host, "_OWN_CGROUPS", tmp_path / "own")
    (tmp_path / "own").write_text("0::/\n")

    def run(limits, iterations=40):
        batches = itertools.repeat([{"image": torch.ones(3, 8, 8)}] * 8)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        monkeypatch.setattr("d2_memfit.engine.window.cutter.GROW_AFTER", 8)
        recovery = RecoveryOptions()
        trainer = AccumulatingTrainer(model, batches, optimizer, recovery=recovery)
        hook = Limits(tmp_path, limits)
        trainer.register_hooks([MakeRoom(), hook])
        trainer.train(0, iterations)
        return hook.sizes

    return run


class Model(Linear):
    def __init__(self):
        super().__init__(8, 2)

    def forward(self, batch):
        return super().forward(torch.stack([image["image"] for image in batch]))


class LowersOwnLimit(HookBase):
    """Lowers the limit of the process's own cgroup (version 1) to 40 MB more than is in use."""

    def __init__(self, folder):
        self._folder = folder
        self.sizes = []

    def after_step(self):
        self.sizes.append(self.trainer.cutter.images)
        if self.trainer.iter == 11:
            used = int((self._folder / "memory.usage_in_bytes").read_text())
            (self._folder / "memory.limit_in_bytes").write_text(str(used + 40 * 2**20))
        if self.trainer.iter == 16:
            (self._folder / "memory.limit_in_bytes").write_text(str(6 * GB))


@patch("d2_memfit.engine.window.cutter.GROW_AFTER", 10)
def train_in_a_cgroup(folder):
    (folder / "memory.limit_in_bytes").write_text(str(6 * GB))
    (folder / "cgroup.procs").write_text(str(os.getpid()))
    batches = itertools.repeat(images(8, 0, size=256, num_instances=3))
    trainer = make_trainer(batches, recovery=RecoveryOptions())
    hook = LowersOwnLimit(folder)
    trainer.register_hooks([MakeRoom(), hook])
    trainer.train(0, 30)
    assert hook.sizes[14] == 4
    assert hook.sizes[-1] is None


@pytest.mark.slow
@pytest.mark.long
def test_the_limit_of_a_real_cgroup():
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    of_memory = [line.split(":")[2].lstrip("/") for line in lines if ":memory:" in line]
    folder = Path("/sys/fs/cgroup/memory", *of_memory, f"memfit_{os.getpid()}")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("needs root, and cgroups of version 1")
    try:
        run = run_forked(__file__, folder)
        assert run.returncode == 0, run.stderr[-2000:]
        assert "other processes have taken 5." in run.stderr
    finally:
        folder.rmdir()


def warnings(log):
    return [r.getMessage() for r in log.records if "other processes have taken" in r.getMessage()]


def test_the_micro_batch_shrinks_before_an_error_and_grows_back(train, log):
    sizes = train({11: 2**20, 16: 4 * GB})
    assert sizes[:14] == [None] * 14
    assert sizes[14] == 4
    assert sizes[-1] is None
    (warning,) = warnings(log)
    assert "of the device cpu and left" in warning


def test_it_shrinks_again_while_the_memory_is_taken(train, log):
    sizes = train({11: 2**20}, iterations=60)
    assert min(s for s in sizes if s) == 1
    assert len(warnings(log)) >= 3


def test_a_size_that_has_grown_into_memory_that_is_taken_is_halved_once(train, log):
    sizes = train({11: 2**20, 15: 4 * GB, 21: 2**20}, iterations=24)
    assert sizes[14:] == [4] * 10
    assert len(warnings(log)) == 2


def test_nothing_is_said_while_there_is_room(train, log):
    assert set(train({11: 3 * GB})) == {None}
    assert not warnings(log)


def test_the_hook_comes_with_recovery(coins, tmp_path):
    cfg = tiny_cfg("mask_rcnn")
    cfg.DATASETS.TRAIN, cfg.OUTPUT_DIR = ("coins_train",), str(tmp_path)
    kinds = {}
    for policy in ("raise", "split"):
        cfg.MEMFIT.OOM.POLICY = policy
        kinds[policy] = [type(hook) for hook in job_hooks(Job.from_cfg(cfg))]
    assert MakeRoom not in kinds["raise"]
    assert MakeRoom in kinds["split"]


if __name__ == "__main__":
    logging.basicConfig()
    train_in_a_cgroup(Path(sys.argv[1]))
