"""What hooks say of a GPU's memory."""

import os
import pickle

import pytest
import torch
from tiny import images, tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer
from d2_memfit.engine.hooks import LeakDetector, MemoryMonitor, MemorySnapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def train(*hooks, num_iterations=4):
    cfg = tiny_cfg("mask_rcnn")
    cfg.MODEL.DEVICE = "cuda"
    model = tiny_model(cfg)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    trainer = AccumulatingTrainer(model, [images(2)] * num_iterations, optimizer)
    trainer.register_hooks(hooks)
    trainer.train(0, num_iterations)
    return trainer


def test_reports_are_the_allocators_and_its_peak_is_not_reset():
    ballast = torch.ones(2**28, device="cuda")  # 1 GiB
    del ballast
    ever = torch.cuda.max_memory_allocated()
    trainer = train(MemoryMonitor(2))
    assert torch.cuda.max_memory_allocated() == ever
    latest = {k: v[0] for k, v in trainer.storage.latest().items()}
    assert latest["memfit/alloc_retries"] == torch.cuda.memory_stats()["num_alloc_retries"]
    assert 0 < latest["memfit/allocated_gb"] <= latest["memfit/allocated_peak_gb"] < 1
    assert latest["memfit/reserved_gb"] <= torch.cuda.max_memory_reserved() / 2**30


def test_a_snapshot_has_pytorchs_own_beside_it(tmp_path):
    train(MemorySnapshot(str(tmp_path), iteration=1))
    assert sorted(os.listdir(tmp_path)) == ["memfit_memory_1.json", "memfit_memory_1.pickle"]
    with open(tmp_path / "memfit_memory_1.pickle", "rb") as f:
        assert pickle.load(f)["segments"]


def test_a_healthy_run_raises_no_alarm(log):
    train(LeakDetector(window=100), num_iterations=300)
    assert "grows" not in log.text
