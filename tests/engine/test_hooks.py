"""Memory over time, in real training on the CPU."""

import json
import logging
import os
import random
import re
import signal
from typing import ClassVar

import pytest
import torch
from detectron2.engine import HookBase, SimpleTrainer, hooks
from detectron2.utils.events import CommonMetricPrinter, JSONWriter, get_event_storage
from injection import Injector
from tiny import images, read_metrics, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer, compat
from d2_memfit.engine import RecoveryOptions
from d2_memfit.engine.hooks import LeakDetector, MemoryMonitor, MemorySnapshot
from d2_memfit.errors import ConfigError

pytestmark = pytest.mark.slow


def make_trainer(loader, family="proposal_network", **kwargs):
    model = tiny_model(tiny_cfg(family))
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


@pytest.fixture
def console(caplog):
    """caplog for Detectron2's console line, whatever setup_logger has done to its loggers."""
    logger = logging.getLogger("detectron2.utils.events")
    logger.addHandler(caplog.handler)
    caplog.set_level("INFO", logger.name)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_reports_go_to_every_writer_and_to_the_console(tmp_path, console):
    trainer = make_trainer(batches())
    writers = [CommonMetricPrinter(4), JSONWriter(str(tmp_path / "metrics.json"))]
    trainer.register_hooks([MemoryMonitor(2, budget_gb=6.0), hooks.PeriodicWriter(writers, 2)])
    trainer.train(0, 4)
    first, second = read_metrics(tmp_path)
    for metrics in (first, second):
        assert 0.1 < metrics["memfit/allocated_gb"] <= metrics["memfit/allocated_peak_gb"] < 6
        assert metrics["memfit/reserved_gb"] <= metrics["memfit/reserved_peak_gb"] < 6
        assert metrics["memfit/budget_used"] == metrics["memfit/reserved_peak_gb"] / 6
        assert 0 <= metrics["memfit/fragmentation"] < 1
        assert metrics["memfit/host_rss_gb"] == pytest.approx(metrics["memfit/allocated_gb"], 0.1)
        assert metrics["memfit/workers_rss_gb"] >= metrics["memfit/workers_private_gb"] >= 0
    lines = {r.getMessage(): r for r in console.records if "total_loss" in r.getMessage()}
    assert len(lines) == 2
    used = f"{second['memfit/reserved_peak_gb']:.1f}"
    assert list(lines)[1].endswith(f"mem {used}/6.0 GB")


def test_a_peak_within_a_forward_is_seen():
    class Hungry(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            get_event_storage().put_scalar("hungry", 1)
            self.kept = torch.ones(2**26) if x else None  # 256 MiB
            return self.weight * 1.0

    peaks = []

    class Look(HookBase):
        def after_step(self):
            peaks.append(get_event_storage().latest()["memfit/allocated_peak_gb"][0])
            self.trainer.model.kept = None

    model = Hungry()
    trainer = AccumulatingTrainer(model, [0, 1, 0], torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.register_hooks([MemoryMonitor(1), Look()])
    trainer.train(0, 3)
    assert peaks[1] - peaks[0] > 0.2
    assert peaks[2] < peaks[1] - 0.2


def test_workers_are_told_from_the_trainer(coins):
    from detectron2.data import build_detection_train_loader

    cfg = tiny_cfg("proposal_network")
    cfg.DATASETS.TRAIN = ("coins_train",)
    cfg.DATALOADER.NUM_WORKERS = 1
    trainer = make_trainer(build_detection_train_loader(cfg))
    trainer.register_hooks([MemoryMonitor(2)])
    trainer.train(0, 2)
    rss, private = (
        trainer.storage.latest()[f"memfit/workers_{kind}_gb"][0] for kind in ("rss", "private")
    )
    assert 0.005 < private < rss


def report_on_rank(rank):
    model = compat.create_ddp_model(
        tiny_model(tiny_cfg("proposal_network")), broadcast_buffers=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    ballast = torch.ones(2**25) if rank else None  # 128 MiB
    trainer = AccumulatingTrainer(model, [images(1)] * 2, optimizer)
    trainer.register_hooks([MemoryMonitor(2)])
    trainer.train(0, 2)
    del ballast
    return {k: v[0] for k, v in trainer.storage.latest().items() if "memfit/allocated" in k}


def test_ranks_are_told_apart(two_ranks):
    main, other = two_ranks.run(report_on_rank)
    low, mean, high = (main[f"memfit/allocated_gb{s}"] for s in ("_min", "_mean", ""))
    assert low < mean < high
    assert high - low > 0.05
    assert mean == pytest.approx((low + high) / 2)
    assert not other


class Leaky(HookBase):
    def __init__(self):
        self.kept = []

    def after_step(self):
        self.kept.append(torch.zeros(25600))  # 100 KiB


def test_a_leak_of_100_kb_is_found_within_500_iterations_with_its_holder(log):
    trainer = make_trainer(batches())
    trainer.register_hooks([Leaky(), LeakDetector()])
    trainer.train(0, 500)
    (warning,) = {r.getMessage() for r in log.records if "grows" in r.getMessage()}
    per_1000 = float(re.search(r"grows by ([\d.]+) MB per 1000", warning)[1])
    assert per_1000 == pytest.approx(97.7, rel=0.1)
    assert "float32 [25600] on cpu" in warning
    assert "held by: Leaky (" in warning


def test_a_leak_in_the_loader_is_told_from_hooks(log, tmp_path):
    class Loader:
        kept: ClassVar[list] = []

        def __iter__(self):
            self.kept = []
            for batch in batches():
                self.kept.append(torch.zeros(25601))
                yield batch

    trainer = make_trainer(Loader())
    trainer.register_hooks([MemorySnapshot(str(tmp_path)), LeakDetector(window=100)])
    trainer.train(0, 200)
    (warning,) = {r.getMessage() for r in log.records if "grows" in r.getMessage()}
    assert "float32 [25601] on cpu" in warning
    assert "held by: the data loader (" in warning


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["proposal_network", "mask_rcnn", "retinanet"])
def test_a_healthy_run_of_2000_iterations_raises_no_alarm(family, log):
    trainer = make_trainer(batches(), family)
    trainer.register_hooks([LeakDetector()])
    trainer.train(0, 2000)
    assert "grows" not in log.text


def test_a_healthy_run_raises_no_alarm(log):
    trainer = make_trainer(batches())
    trainer.register_hooks([LeakDetector(window=50)])
    trainer.train(0, 150)
    assert "grows" not in log.text


def read(path):
    return json.loads(path.read_text())


def test_the_snapshot_of_an_iteration_says_who_had_the_peak(tmp_path):
    trainer = make_trainer(batches(), "mask_rcnn")
    trainer.register_hooks([MemorySnapshot(str(tmp_path), iteration=1)])
    trainer.train(0, 3)
    assert os.listdir(tmp_path) == ["memfit_memory_1.json"]
    snapshot = read(tmp_path / "memfit_memory_1.json")
    assert sum(snapshot["owners"].values()) == snapshot["total_bytes"]
    assert {"parameters", "optimizer", "activations: roi_heads"} <= snapshot["owners"].keys()


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="the system has no such signal")
def test_a_signal_asks_for_a_snapshot(tmp_path):
    class Ask(HookBase):
        def after_step(self):
            if self.trainer.iter == 1:
                os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.getsignal(signal.SIGUSR1)
    trainer = make_trainer(batches())
    trainer.register_hooks([MemorySnapshot(str(tmp_path)), Ask()])
    trainer.train(0, 4)
    assert os.listdir(tmp_path) == ["memfit_memory_2.json"]
    assert signal.getsignal(signal.SIGUSR1) == before


class Failing(AccumulatingTrainer):
    """Memory runs out in each iteration, once."""

    def run_step(self):
        self.injector = Injector([50])
        super().run_step()

    def _forward(self, micro_batch):
        with self._observed(), self.injector:
            return super()._forward(micro_batch)


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path, log):
    file = tmp_path / "file"
    file.write_text("")
    trainer = make_trainer(batches(), recovery=RecoveryOptions())
    trainer.__class__ = Failing
    trainer.register_hooks([MemorySnapshot(str(file), on_oom=True)])
    trainer.train(0, 2)
    assert "What was to be seen of the memory is lost" in log.text


def test_a_trainer_that_cannot_be_observed_is_an_error(tmp_path):
    model = tiny_model(tiny_cfg("proposal_network"))
    trainer = SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.register_hooks([MemorySnapshot(str(tmp_path), on_oom=True)])
    with pytest.raises(ConfigError, match="needs an AccumulatingTrainer, and this is a SimpleT"):
        trainer.train(0, 1)


@pytest.mark.parametrize("recovers", [False, True])
def test_out_of_memory_errors_are_written_down_where_they_happen(recovers, tmp_path):
    model = tiny_model(tiny_cfg("mask_rcnn"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    options = RecoveryOptions() if recovers else None
    trainer = Failing(model, batches(), optimizer, recovery=options)
    trainer.register_hooks([MemorySnapshot(str(tmp_path), on_oom=True)])
    if recovers:
        trainer.train(0, 5)
        assert sorted(os.listdir(tmp_path)) == [f"memfit_oom_{i}.json" for i in (1, 2, 3)]
    else:
        with pytest.raises(torch.OutOfMemoryError):
            trainer.train(0, 5)
    assert not trainer.out_of_memory_observers
    snapshot = read(tmp_path / "memfit_oom_1.json")
    parameters = sum(p.nbytes for p in model.parameters())
    assert snapshot["owners"]["parameters"] == parameters
    assert sum(snapshot["owners"].values()) == snapshot["total_bytes"]
    assert 0 < len(snapshot["tensors"]) <= 50
