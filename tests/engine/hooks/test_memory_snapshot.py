# Copyright (c) the d2_memfit developers.
"""Who has the memory at one moment of real training on the CPU."""

import json
import os
import signal

import pytest
import torch
from detectron2.engine import HookBase, SimpleTrainer, hooks
from injection import Injector
from monitored import batches, make_trainer
from tiny import tiny_cfg, tiny_model

from d2_memfit import AccumulatingTrainer
from d2_memfit.engine.hooks import MemorySnapshot
from d2_memfit.engine.oom_log import observed
from d2_memfit.errors import ConfigError
from d2_memfit.settings import RecoveryOptions

pytestmark = pytest.mark.slow


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
        with observed(self.out_of_memory_observers), self.injector:
            return super()._forward(micro_batch)


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path, log):
    file = tmp_path / "file"
    file.write_text("")
    trainer = make_trainer(batches(), recovery=RecoveryOptions())
    trainer.__class__ = Failing
    trainer.register_hooks([MemorySnapshot(str(file), on_oom=True)])
    trainer.train(0, 2)
    assert "The memory at this error could not be recorded" in log.text


def test_a_trainer_that_cannot_be_observed_is_an_error(tmp_path):
    model = tiny_model(tiny_cfg("proposal_network", fpn=False))
    trainer = SimpleTrainer(model, batches(), torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.register_hooks([MemorySnapshot(str(tmp_path), on_oom=True)])
    with pytest.raises(ConfigError, match="needs an AccumulatingTrainer, and this is a SimpleT"):
        trainer.train(0, 1)


def test_an_error_before_it_begins_is_not_hidden(tmp_path):
    def fail(trainer):
        raise ZeroDivisionError

    trainer = make_trainer(batches())
    trainer.register_hooks([hooks.CallbackHook(before_train=fail), MemorySnapshot(str(tmp_path))])
    with pytest.raises(ZeroDivisionError):
        trainer.train(0, 1)


@pytest.mark.parametrize("recovers", [False, True])
def test_out_of_memory_errors_are_written_down_where_they_happen(recovers, tmp_path):
    model = tiny_model(tiny_cfg("mask_rcnn", fpn=False))
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
