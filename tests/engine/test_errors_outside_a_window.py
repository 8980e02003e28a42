# Copyright (c) the d2_memfit developers.
"""Memory that runs out where nothing can be run again: one explanation, one line in the record."""

import json
from functools import partial

import pytest
import torch
from detectron2.checkpoint import Checkpointer
from detectron2.engine import HookBase, hooks
from injection import iterate
from tiny import images

from d2_memfit import AccumulatingTrainer, compat
from d2_memfit.engine.attempts import Recovery, recovering_inference
from d2_memfit.engine.state import StateCopy
from d2_memfit.errors import OutOfMemoryError
from d2_memfit.settings import RecoveryOptions

pytestmark = pytest.mark.slow


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


class Average(HookBase):
    """As a hook that keeps an exponential moving average of weights."""

    def after_step(self):
        run_out()


class Full(Checkpointer):
    def save(self, name, **kwargs):
        run_out()


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (Average(), "Average"),
        (hooks.PeriodicCheckpointer(Full(torch.nn.Linear(1, 1)), 1), "PeriodicCheckpointer"),
        (hooks.EvalHook(1, run_out), "EvalHook"),
    ],
    ids=["average", "checkpoint", "evaluation"],
)
def test_a_hook_is_named(hook, name, tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.register_hooks([hook])
    with pytest.raises(OutOfMemoryError, match=f"hook {name} of iteration 0.*to try.*OUT_OF_M"):
        trainer.train(0, 2)
    assert phases(tmp_path)[0] == f"hook {name}"


def test_other_errors_of_hooks_and_other_policies_are_left_alone(tmp_path):
    trainer = AccumulatingTrainer(
        Model(), [images(2, size=32)], torch.optim.SGD(Model().parameters(), lr=0.1)
    )
    trainer.register_hooks([Average()])
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory$"):
        trainer.train(0, 1)
    trainer = trainer_of(tmp_path)
    trainer.register_hooks([hooks.CallbackHook(after_step=lambda _: 1 / 0)])
    with pytest.raises(ZeroDivisionError):
        trainer.train(0, 1)


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
        monkeypatch.setattr("d2_memfit.engine.attempts.attempts.release_memory", run_out)
    trainer = trainer_of(tmp_path)
    trainer.model.fits = 1
    with pytest.raises(OutOfMemoryError, match="in the restoration of iteration 0"):
        iterate(trainer)
    assert phases(tmp_path) == ["forward", "restoration"]


def test_an_evaluator(tmp_path):
    options = RecoveryOptions(output_dir=str(tmp_path))
    with (
        pytest.raises(OutOfMemoryError, match=r"in the evaluation.*MAX_SIZE_TEST"),
        recovering_inference(Model(), options),
    ):
        run_out()
    assert phases(tmp_path) == ["evaluation"]


AT_START = "d2_memfit.engine.resuming.resumable_trainer.StateCopy"


def resumed_trainer(output_dir):
    earlier = trainer_of(output_dir, steps=2)
    iterate(earlier)
    trainer = trainer_of(output_dir, steps=2)
    trainer.load_state_dict(earlier.state_dict())
    return trainer


@pytest.mark.parametrize("start", [partial(trainer_of, steps=2), resumed_trainer])
def test_the_start_of_a_window_is_tried_again_and_then_explained(start, tmp_path, monkeypatch):
    trainer, made = start(tmp_path), []

    def fail_once(*args, **kwargs):
        made.append(args)
        return run_out() if len(made) == 1 else StateCopy(*args, **kwargs)

    monkeypatch.setattr(AT_START, fail_once)
    iterate(trainer)
    assert len(made) > 1
    trainer = start(tmp_path)
    monkeypatch.setattr(AT_START, run_out)
    with pytest.raises(OutOfMemoryError, match=r"in the start of iteration .*to try.*OUT_OF_M"):
        iterate(trainer)
    assert phases(tmp_path) == ["start"]


@pytest.mark.parametrize("start", [trainer_of, resumed_trainer])
def test_counts_that_find_no_memory(start, tmp_path, monkeypatch):
    trainer = start(tmp_path)
    monkeypatch.setattr(trainer.counts, "prepare", run_out)
    with pytest.raises(OutOfMemoryError, match="in the window of iteration 0"):
        iterate(trainer)
    assert phases(tmp_path) == ["window"]


def test_an_error_at_the_end_of_a_window_names_its_last_images(tmp_path, monkeypatch):
    monkeypatch.setattr(Recovery, "end_window", run_out)
    with pytest.raises(OutOfMemoryError, match=r"in the window .*micro-batch of 2.*image_0.png"):
        iterate(trainer_of(tmp_path))


def fail_at_the_end(rank, output_dir):
    model = compat.create_ddp_model(Model(), broadcast_buffers=False)
    trainer = trainer_of(output_dir, model, steps=2)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(Recovery, "end_window", run_out)
        return error_of(trainer)


def test_all_ranks_hear_of_an_end_that_fails_on_one(two_ranks, tmp_path):
    first, second = two_ranks.run(fail_at_the_end, tmp_path)
    assert first == second
    assert "in the window of iteration 0 on rank 1" in first


def fail_in_the_vote(rank, output_dir):
    model = compat.create_ddp_model(Model(), broadcast_buffers=False)
    trainer = trainer_of(output_dir, model)
    if rank == 1:
        model.module.fits = 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StateCopy, "restore", run_out)
            return error_of(trainer)
    return error_of(trainer)


def error_of(trainer):
    try:
        iterate(trainer)
    except OutOfMemoryError as e:
        return str(e)
    return None


def test_all_ranks_hear_of_a_restoration_that_fails_on_one(two_ranks, tmp_path):
    first, second = two_ranks.run(fail_in_the_vote, tmp_path)
    assert first == second
    assert "in the restoration of iteration 0 on rank 1" in first
    assert phases(tmp_path) == ["forward", "restoration"]
