# Copyright (c) the d2_memfit developers.
"""Hooks that watch memory, in real training on the CPU, and the keys that turn them on."""

import gc
import json
import logging
import math
import mmap
import os
import random

import numpy as np
import pytest
import torch
from detectron2.data import build_detection_train_loader
from detectron2.engine import hooks
from detectron2.utils.events import JSONWriter
from injection import InjectedTrainer, Injector
from monitored import cheap_trainer
from tiny import ROOT, images, read_metrics, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer, MemfitTrainer, get_cfg, memory
from d2_memfit.config.settings import RecoveryOptions
from d2_memfit.engine.build import job_hooks
from d2_memfit.engine.hooks import (
    LeakDetector,
    MemoryMonitor,
    MemorySnapshot,
    PeakRecorder,
    rises_steadily,
)
from d2_memfit.engine.run_state import GatherStates
from d2_memfit.job import Job
from d2_memfit.memory import FIGURES

KIB, MB = 2**10, 2**20


def test_each_key_turns_one_hook_on_and_has_a_row():
    kinds = []
    page = (ROOT / "docs" / "MONITORING.md").read_text()
    for key in [None, *get_cfg().MEMFIT.MONITOR]:
        cfg = tiny_cfg("mask_rcnn", fpn=False)
        if key is not None:
            cfg.MEMFIT.MONITOR[key] = True if cfg.MEMFIT.MONITOR[key] is False else 40
            assert f"| `MEMFIT.MONITOR.{key}` |" in page
        kinds.append([type(hook) for hook in job_hooks(Job.from_cfg(cfg))])
    assert kinds[0] == [GatherStates, PeakRecorder]
    more = [[kind for kind in found if kind not in kinds[0]] for found in kinds[1:]]
    assert sorted(more, key=str) == [[LeakDetector], [MemoryMonitor], [MemorySnapshot]]


def test_reports_go_to_writers_and_the_log(coins, tmp_path, log):
    cfg = tiny_cfg("proposal_network", fpn=False)
    cfg.DATASETS.TRAIN, cfg.DATALOADER.NUM_WORKERS = ("coins_train",), 1
    model = tiny_model(cfg)
    sgd = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    trainer = AccumulatingTrainer(model, build_detection_train_loader(cfg), sgd)
    writers = [JSONWriter(str(tmp_path / "metrics.json"))]
    trainer.register_hooks([MemoryMonitor(2, budget_gb=6.0), hooks.PeriodicWriter(writers, 2)])
    trainer.train(0, 4)
    for metrics in read_metrics(tmp_path):
        found = {k.partition("/")[2]: v for k, v in metrics.items() if k.startswith("memfit/")}
        assert 0.1 < found["allocated_gb"] <= found["allocated_peak_gb"] < 6
        assert found["reserved_gb"] <= found["reserved_peak_gb"] < 6
        assert found["host_rss_gb"] == pytest.approx(found["allocated_gb"], 0.1)
        assert 0.005 < found["workers_private_gb"] < found["workers_rss_gb"]
    assert f"Memory until iteration 3: {found['reserved_peak_gb']:.1f}/6.0 GB" in log.text


def test_a_peak_is_that_since_the_last_report(monkeypatch):
    trainer, used = cheap_trainer(), [memory.DeviceMemory(*[size] * 4) for size in (2**30, 2**29)]
    monkeypatch.setattr(memory, "device_memory", lambda _: used[trainer.iter])
    trainer.register_hooks([MemoryMonitor(1)])
    trainer.train(0, 2)
    peaks = trainer.storage.history("memfit/allocated_peak_gb").values()
    assert [gb for gb, _ in peaks] == [1.0, 0.5]


def report_on_rank(rank):
    ballast = torch.ones(2**25) if rank else None  # 128 MiB
    trainer = cheap_trainer()
    trainer.register_hooks([MemoryMonitor(2)])
    trainer.train(0, 2)
    del ballast
    return {k: v[0] for k, v in trainer.storage.latest().items() if "memfit/allocated" in k}


def test_ranks_are_told_apart(two_ranks):
    main, other = two_ranks.run(report_on_rank)
    low, mean, high = (main[f"memfit/allocated_gb{s}"] for s in ("_min", "_mean", ""))
    assert low + 0.05 < high
    assert mean == pytest.approx((low + high) / 2)
    assert not other


LEAKS = {  # KiB per iteration, and what is named
    "tensors": (lambda: torch.ones(2**18), 1024, "float32 [262144] on cpu ("),
    "arrays": (lambda: np.ones(128 * KIB), 1024, ""),
    "nothing": (lambda: None, 0, ""),
}


def growing_kinds(rank, name):
    """What grows, by MB in 1000 iterations, and the tensors that are named."""

    def after_step(_):
        kept.append(LEAKS[name][0]())
        garbage = [np.ones(2 * KIB)]
        garbage.append(garbage)

    kept, said = [], []
    gc.disable()  # the garbage of large programs stays as long
    trainer = cheap_trainer()
    trainer.register_hooks([hooks.CallbackHook(after_step=after_step), LeakDetector(window=100)])
    with pytest.MonkeyPatch.context() as patch:
        logger = logging.getLogger("d2_memfit.engine.hooks")
        patch.setattr(logger, "warning", lambda text, *args: said.append(args))
        trainer.train(0, 250)
    gc.enable()
    return [(kind, growth, tensors) for kind, growth, _, tensors in said]


@pytest.mark.parametrize("name", LEAKS)
def test_what_grows_is_found_and_garbage_in_cycles_is_not(name, two_ranks):
    _, kib, named = LEAKS[name]
    for found in two_ranks.run(growing_kinds, name):
        assert len(found) == (kib > 0)
        for kind, growth, tensors in found:
            assert kind == "memory in use on cpu"
            assert growth == pytest.approx(kib * 1000 / KIB, rel=0.4)  # some of it fills freed heap
            assert named in tensors


SERIES = {  # by iteration, of 400
    "growth": (True, lambda i, rng: 1e5 * i),
    "growth within noise": (True, lambda i, rng: 1e5 * i + rng.random() * 10 * MB),
    "noise": (False, lambda i, rng: rng.random() * 50 * MB),
    "a cache that is full": (False, lambda i, rng: 1e5 * min(i, 320)),
    "a cache that fills slowly": (False, lambda i, rng: MB * (1 - math.exp(-i / 100))),
    "evaluations": (False, lambda i, rng: 2 * MB * (i // 40)),
    "steps in little growth": (False, lambda i, rng: 100 * i + 10 * MB * (i // 170)),
}


@pytest.mark.parametrize("kind", SERIES)
def test_only_steady_growth_is_a_leak(kind):
    leaks, value = SERIES[kind]
    for seed in range(20):
        rng = random.Random(seed)
        values = [100 * MB + value(i, rng) for i in range(400)]
        assert rises_steadily(values, 8 * KIB * 400) == leaks


class Failing(InjectedTrainer):
    """Memory runs out in each iteration, once."""

    def run_step(self):
        self.injector = Injector([50])
        super().run_step()


@pytest.mark.parametrize("recovers", [False, True])
def test_owners_at_out_of_memory_errors_are_written_down(recovers, tmp_path, log):
    model = tiny_model(tiny_cfg("mask_rcnn", fpn=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    options = RecoveryOptions() if recovers else None
    trainer = Failing(model, [images(4)] * 5, optimizer, recovery=options)
    (tmp_path / "file").write_text("")  # a folder that cannot be written ends no run
    snapshots = [MemorySnapshot(str(folder)) for folder in (tmp_path / "file", tmp_path / "ok")]
    trainer.register_hooks(snapshots)
    if recovers:
        trainer.train(0, 5)
        assert sorted(os.listdir(tmp_path / "ok")) == [f"memfit_oom_{i}.json" for i in (1, 2, 3)]
    else:
        with pytest.raises(torch.OutOfMemoryError):
            trainer.train(0, 5)
    assert "The memory at this error could not be recorded" in log.text
    assert not trainer.out_of_memory_observers
    snapshot = json.loads((tmp_path / "ok" / "memfit_oom_1.json").read_text())
    assert snapshot["owners"]["parameters"] == sum(p.nbytes for p in model.parameters())
    assert sum(snapshot["owners"].values()) == snapshot["total_bytes"]
    assert 0 < len(snapshot["tensors"]) <= 50


class Taking(MemfitTrainer):
    """Takes 200 MB more RAM than this process ever has, in the last iteration but one."""

    @classmethod
    def build_train_loader(cls, cfg):
        return [images(2, first=2 * i, size=size) for i, size in enumerate([64, 96, 64, 64])]

    def run_step(self):
        if self.iter == 0:  # RLIMIT_DATA counts memory before it is touched
            self.reserved = mmap.mmap(-1, 700 * MB, flags=mmap.MAP_PRIVATE)
            self._trainer.out_of_memory_observers[0]()
        if self.iter == self.max_iter - 2:
            now = memory.process_memory()
            taken_before = now.peak_resident_bytes - now.resident_bytes
            _ = torch.ones(taken_before + 200 * MB, dtype=torch.uint8)
        super().run_step()


def test_peaks_are_in_the_output_folder_with_those_that_were_predicted(tmp_path, log):
    cfg = tiny_cfg("retinanet", fpn=False)
    cfg.DATASETS.TEST, cfg.OUTPUT_DIR, cfg.SOLVER.IMS_PER_BATCH = (), str(tmp_path), 2
    figures = json.dumps({"predicted_gb": [0.3, 0.4, 0.5]})
    (tmp_path / "memfit_plan.yaml").write_text(f"{FIGURES}{figures}\n")
    for cfg.SOLVER.MAX_ITER in (2, 4):
        assert not (tmp_path / "memfit_peaks.json").exists()  # of fewer iterations there is none
        Taking(cfg).train()
    record = json.loads((tmp_path / "memfit_peaks.json").read_text())
    assert record["allocated_bytes"] > 900 * MB
    assert 50 * MB < record["outside_bytes"] < 8000 * MB
    assert (record["iterations"], record["predicted_gb"]) == (4, [0.3, 0.4, 0.5])
    assert record["had_errors"]
    assert "Peaks of training: " in log.text
    assert "The plan predicted 0.30, 0.40 and 0.50 GB for its largest images" in log.text
