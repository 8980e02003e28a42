# Copyright (c) the d2_memfit developers.
"""The peaks that training records."""

import json
import mmap
import re

import pytest
import torch
from detectron2.structures import Instances
from tiny import images, tiny_cfg

from d2_memfit import Job, MemfitTrainer
from d2_memfit.engine.hooks.peak_recorder import PeakRecorder
from d2_memfit.memory import process_memory

pytestmark = pytest.mark.slow

MB = 2**20


class Trainer(MemfitTrainer):
    @classmethod
    def build_train_loader(cls, cfg):
        sizes = [64, 96, 64, 64]
        return [images(2, first=2 * i, size=size) for i, size in enumerate(sizes)]


class Keeping(Trainer):
    """Takes 200 MB more than this process ever has, in the last iteration but one."""

    def run_step(self):
        if self.iter == self.max_iter - 2:
            memory = process_memory()
            taken_before = memory.peak_resident_bytes - memory.resident_bytes
            _ = torch.ones(taken_before + 200 * MB, dtype=torch.uint8)
        super().run_step()


@pytest.fixture
def train(tmp_path):
    def run(trainer=Trainer, max_iter=4, **memfit):
        cfg = tiny_cfg("retinanet", fpn=False)
        cfg.DATASETS.TEST = ()
        cfg.SOLVER.IMS_PER_BATCH = 2
        cfg.SOLVER.MAX_ITER = max_iter
        cfg.OUTPUT_DIR = str(tmp_path / "output")
        cfg.MEMFIT.PLAN.update(memfit)
        made = trainer(cfg)
        made.train()
        return made

    return run


def record_of(tmp_path):
    return json.loads((tmp_path / "output" / "memfit_peaks.json").read_text())


def test_peaks_are_in_the_output_folder(train, tmp_path, log):
    train(Keeping, PREDICTED_GB=[0.3, 0.4, 0.5])
    record = record_of(tmp_path)
    assert record["allocated_bytes"] > 200 * MB
    assert 50 * MB < record["outside_bytes"] < 8000 * MB
    assert record["iterations"] == 4
    assert record["predicted_gb"] == [0.3, 0.4, 0.5]
    assert re.search(r"Peaks of training: \d\.\d\d GB allocated", log.text)
    assert "The plan predicted 0.30, 0.40 and 0.50 GB for its largest images" in log.text


def test_the_micro_batch_of_the_peak_is_recorded(train, tmp_path):
    train(Keeping)
    assert record_of(tmp_path)["micro_batch"] == [2, 64, 64, 6]


def test_on_a_cpu_private_memory_counts_before_it_is_touched(train, tmp_path):
    """A budget there is RLIMIT_DATA, which counts the stacks of threads."""

    class Reserving(Keeping):
        def run_step(self):
            if self.iter == 0:
                self.reserved = mmap.mmap(-1, 700 * MB, flags=mmap.MAP_PRIVATE)
            super().run_step()

    train(Reserving)
    assert record_of(tmp_path)["allocated_bytes"] > 900 * MB


@pytest.mark.parametrize(
    "batch",
    [
        (),
        None,
        torch.ones(2, 3, 8, 8),
        (torch.ones(2, 3, 8, 8), ["a target"]),
        [{"image": None, "instances": None}],
        [{"instances": Instances((8, 8))}],
        [{"image": torch.ones(3, 8, 8), "instances": "three"}, 5],
    ],
)
def test_batches_of_any_kind_have_a_size(batch):
    hook = PeakRecorder(Job.from_cfg(tiny_cfg(fpn=False)))
    hook.after_forward(torch.nn.Identity().train(), (batch,))
    assert len(hook._micro_batch) == 4


def test_a_run_of_two_iterations_is_not_recorded(train, tmp_path):
    train(max_iter=2)
    assert not (tmp_path / "output" / "memfit_peaks.json").exists()


def test_a_run_that_ran_out_of_memory_says_so(train, tmp_path):
    class Failing(Keeping):
        def run_step(self):
            for observer in self._trainer.out_of_memory_observers:
                observer()
            super().run_step()

    train(Failing)
    assert record_of(tmp_path)["had_errors"]


def test_a_record_that_cannot_be_written_costs_a_warning(train, tmp_path, log):
    (tmp_path / "output" / "memfit_peaks.json").mkdir(parents=True)
    train(Keeping)
    assert f"The peaks of this run cannot be kept in {tmp_path / 'output'} (" in log.text


def test_no_run_ends_for_its_record(train, monkeypatch, log):
    def fail(_):
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr("d2_memfit.engine.hooks.peak_recorder.device_and_software", fail)
    train(Keeping)
    assert "cannot be kept in " in log.text
    assert "(the driver is gone)" in log.text
