"""Leaks, and healthy runs, in real training on the CPU."""

import re
from typing import ClassVar

import pytest
import torch
from detectron2.engine import HookBase
from monitored import batches, make_trainer

from d2_memfit.engine import LeakDetector, MemorySnapshot

pytestmark = pytest.mark.slow


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
