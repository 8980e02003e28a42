# Copyright (c) the d2_memfit developers.
"""An out-of-memory error where nothing can be run again is explained, on all ranks."""

import json

import pytest
import torch
from injection import iterate
from tiny import images

from d2_memfit import AccumulatingTrainer
from d2_memfit.common import compat
from d2_memfit.common.errors import OutOfMemoryError
from d2_memfit.common.snapshot import Snapshot as StateCopy
from d2_memfit.config.settings import RecoveryOptions
from d2_memfit.engine.retry import WindowRetries


class Model(torch.nn.Module):
    """Its forward fails with more than ``fits`` images."""

    fits = 2

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, batch):
        if len(batch) > self.fits:
            run_out()
        return {"loss": self.weight.sum() * len(batch)}


def run_out(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory")


def trainer_of(output_dir, model=None, steps=1, **options):
    model = model or Model()
    bare = compat.without_ddp(model)
    options = RecoveryOptions(output_dir=str(output_dir), **options)
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
    loader = [images(2, size=32)] * 6
    return AccumulatingTrainer(model, loader, optimizer, accumulation_steps=steps, recovery=options)


def phases(output_dir):
    return [json.loads(line)["phase"] for line in (output_dir / "memfit_oom.jsonl").open()]


def test_the_vote(tmp_path, monkeypatch):
    monkeypatch.setattr("d2_memfit.engine.train_loop.RankReport.add", run_out)
    with pytest.raises(OutOfMemoryError, match="in the vote of iteration 0"):
        iterate(trainer_of(tmp_path))
    assert phases(tmp_path) == ["vote"]


@pytest.mark.parametrize("part", ["restore", "release_memory"])
def test_the_first_failure_is_on_file_when_the_restoration_fails(part, tmp_path, monkeypatch):
    if part == "restore":
        monkeypatch.setattr(StateCopy, "restore", run_out)
    else:
        monkeypatch.setattr("d2_memfit.engine.retry.release_memory", run_out)
    trainer = trainer_of(tmp_path)
    trainer.model.fits = 1
    with pytest.raises(OutOfMemoryError, match="in the restoration of iteration 0"):
        iterate(trainer)
    assert phases(tmp_path) == ["forward", "restoration"]


def fail_at_the_end(rank, output_dir):
    model = compat.create_ddp_model(Model(), broadcast_buffers=False)
    trainer = trainer_of(output_dir, model, steps=2)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(WindowRetries, "end_window", run_out)
        return error_of(trainer)


def test_all_ranks_hear_of_an_end_that_fails_on_one(two_ranks, tmp_path):
    first, second = two_ranks.run(fail_at_the_end, tmp_path)
    assert first == second
    assert "in the window of iteration 0 on rank 1" in first


def error_of(trainer):
    try:
        iterate(trainer)
    except OutOfMemoryError as e:
        return str(e)
    return None
