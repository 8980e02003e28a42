# Copyright (c) the d2_memfit developers.
"""Memory over time, in real training on the CPU."""

import logging

import psutil
import pytest
import torch
from detectron2.engine import HookBase, hooks
from detectron2.utils.events import CommonMetricPrinter, JSONWriter, get_event_storage
from monitored import batches, make_trainer
from tiny import images, read_metrics, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer, compat
from d2_memfit.engine.hooks import MemoryMonitor
from d2_memfit.engine.hooks.memory_monitor import _rss_and_private

pytestmark = pytest.mark.slow


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

    cfg = tiny_cfg("proposal_network", fpn=False)
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
        tiny_model(tiny_cfg("proposal_network", fpn=False)), broadcast_buffers=False
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


class OfAnotherUser:
    def memory_info(self):
        raise psutil.AccessDenied


def test_a_process_that_may_not_be_read_counts_nothing():
    assert _rss_and_private(OfAnotherUser()) == (0, 0)
