# Copyright (c) the d2_memfit developers.
"""Signals that ask a run to end: in training, in evaluation, on one rank and on two."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from detectron2.engine import hooks
from detectron2.evaluation import DatasetEvaluator, inference_on_dataset
from detectron2.utils import comm
from saving import Toy, resumed, trainer_of
from tiny import ROOT, tiny_cfg

from d2_memfit.compat import create_ddp_model
from d2_memfit.engine import AccumulatingTrainer, MemfitCheckpointer, StopOnSignals
from d2_memfit.engine.signals import SIGNALS
from d2_memfit.errors import CheckpointError


def at(iteration, *numbers):
    """A hook that sends signals to its own process within an iteration."""

    def send(trainer):
        if trainer.iter == iteration:
            for number in numbers:
                os.kill(os.getpid(), number)

    return hooks.CallbackHook(before_step=send)


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


def stopped_run(folder, *own_hooks, max_iter=10):
    """A run that saves nothing but when it is asked to end; the status it ends with."""
    trainer, checkpointer = trainer_of(folder, size=50)
    trainer._hooks.clear()
    trainer.register_hooks([*own_hooks, StopOnSignals(checkpointer)])
    before = handlers()
    with pytest.raises(SystemExit) as e:
        trainer.train(0, max_iter)
    assert handlers() == before
    return e.value.code


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR2, 140)]
)
def test_a_signal_ends_the_run_after_the_iteration_with_a_checkpoint(tmp_path, number, status):
    assert stopped_run(tmp_path, at(3, number)) == status
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000003.pth"
    assert resumed(tmp_path, size=50)[1] == 3  # which looks at the weights


def test_a_second_sigint_ends_at_once_without_a_checkpoint(tmp_path):
    trainer, checkpointer = trainer_of(tmp_path, size=50)
    trainer._hooks.clear()
    trainer.register_hooks([at(3, signal.SIGINT, signal.SIGINT), StopOnSignals(checkpointer)])
    before = handlers()
    with pytest.raises(KeyboardInterrupt):
        trainer.train(0, 10)
    assert trainer.iter == 3
    assert handlers() == before
    assert not list(tmp_path.iterdir())


def test_ctrl_c_ends_at_once_the_second_time_also_after_another_signal(tmp_path):
    trainer, checkpointer = trainer_of(tmp_path, size=50)
    trainer._hooks.clear()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGINT)
    trainer.register_hooks([at(3, *numbers), StopOnSignals(checkpointer)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train(0, 10)
    assert not list(tmp_path.iterdir())


def test_a_handler_that_is_there_is_left_alone(tmp_path, log):
    came = []
    former = signal.signal(signal.SIGUSR2, lambda number, frame: came.append(number))
    try:
        trainer, checkpointer = trainer_of(tmp_path, size=50)
        trainer.register_hooks([at(3, signal.SIGUSR2), StopOnSignals(checkpointer)])
        trainer.train(0, 10)
    finally:
        signal.signal(signal.SIGUSR2, former)
    assert came == [signal.SIGUSR2]
    assert trainer.iter == 10
    assert "SIGUSR2 has a handler already, which is left alone" in log.text


def test_in_the_last_iteration_the_run_ends_as_always(tmp_path):
    trainer, checkpointer = trainer_of(tmp_path, size=50)
    trainer.register_hooks([at(9, signal.SIGTERM), StopOnSignals(checkpointer)])
    trainer.train(0, 10)
    assert trainer.iter == 10


def test_a_checkpoint_that_cannot_be_saved_then_is_an_error(tmp_path):
    (tmp_path / "model_0000003.pth.tmp" / "full").mkdir(parents=True)
    trainer, checkpointer = trainer_of(tmp_path, size=50)
    checkpointer._has_begun = True
    trainer._hooks.clear()
    trainer.register_hooks([at(3, signal.SIGTERM), StopOnSignals(checkpointer)])
    with pytest.raises(CheckpointError, match="cannot save the checkpoint"):
        trainer.train(0, 10)


class Batches(DatasetEvaluator):
    """An evaluation of some batches, with a signal before one of them and a collective at its end.

    ``batches``, ``signalled`` and ``wait_s`` are of this rank: how many, before which, and how long
    each takes.
    """

    def __init__(self, model, batches, signalled=None, wait_s=0.0):
        self._model, self._batches, self._signalled = model, batches, signalled
        self._wait_s = wait_s
        self.seen = self.ended = 0

    def __call__(self):
        inference_on_dataset(self._model, [[{}]] * self._batches, self)

    def process(self, inputs, outputs):
        self.seen += 1
        time.sleep(self._wait_s)
        if self.seen == self._signalled:
            os.kill(os.getpid(), signal.SIGTERM)

    def evaluate(self):
        comm.synchronize()
        self.ended += 1
        return {}


@pytest.mark.parametrize("period", [2, 0], ids=["between", "at the end"])
def test_an_evaluation_is_left_before_the_next_batch(tmp_path, period):
    trainer, checkpointer = trainer_of(tmp_path, size=50)
    evaluation = Batches(trainer.model, batches=10, signalled=4)
    trainer.register_hooks([hooks.EvalHook(period, evaluation), StopOnSignals(checkpointer)])
    before = handlers()
    with pytest.raises(SystemExit) as e:
        trainer.train(0, 6)
    assert e.value.code == 143
    assert (evaluation.seen, evaluation.ended) == (4, 0)
    assert type(trainer.model) is Toy
    assert handlers() == before
    assert resumed(tmp_path, size=50)[1] == (1 if period else 5)


def stop_on_ranks(rank, folder, signalled_rank, evaluation_options, max_iter):
    """The status, the last iteration, and the batches of an evaluation after iteration 1."""
    model = create_ddp_model(Toy(50))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    trainer = AccumulatingTrainer(model, iter(lambda: [{}], None), optimizer, accumulation_steps=2)
    checkpointer = MemfitCheckpointer(model, str(folder), trainer=trainer)
    own, evaluation = [], None
    if evaluation_options:
        evaluation = Batches(model, **evaluation_options[rank])
        own = [hooks.EvalHook(2, evaluation)]
    elif rank == signalled_rank:
        own = [at(2, signal.SIGTERM)]
    trainer.register_hooks([*own, StopOnSignals(checkpointer)])
    try:
        trainer.train(0, max_iter)
    except SystemExit as e:
        return e.code, trainer.iter, evaluation and (evaluation.seen, evaluation.ended)
    return 0, trainer.iter, None


@pytest.mark.parametrize("signalled_rank", [0, 1])
def test_one_rank_that_is_asked_ends_all_after_the_same_iteration(
    two_ranks, tmp_path, signalled_rank
):
    ends = two_ranks.run(stop_on_ranks, tmp_path, signalled_rank, None, 10)
    assert ends == [(143, 2, None)] * 2
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000002.pth"


@pytest.mark.parametrize("signalled_rank", [0, 1])
def test_all_ranks_leave_an_evaluation_when_one_is_asked(two_ranks, tmp_path, signalled_rank):
    options = [{"batches": 200, "wait_s": 0.01}, {"batches": 200, "wait_s": 0.01}]
    options[signalled_rank]["signalled"] = 3
    ends = two_ranks.run(stop_on_ranks, tmp_path, None, options, 10)
    assert [(status, iteration) for status, iteration, _ in ends] == [(143, 1)] * 2
    assert all(seen < 100 and not ended for _, _, (seen, ended) in ends)
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000001.pth"


@pytest.mark.parametrize("signalled_rank", [0, 1])
def test_a_rank_that_waits_for_the_others_results_gets_them(two_ranks, tmp_path, signalled_rank):
    options = [{"batches": 1}, {"batches": 1}]
    options[signalled_rank] = {"batches": 60, "wait_s": 0.01, "signalled": 40}
    ends = two_ranks.run(stop_on_ranks, tmp_path, None, options, 10)
    assert [(status, iteration) for status, iteration, _ in ends] == [(143, 2)] * 2
    assert all(ended == 1 for _, _, (_, ended) in ends)
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000002.pth"


def is_there(group):
    """Whether a process of a group is alive."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


TRAIN_NET = ROOT / "tools" / "train_net.py"
RANKS = ["--num-gpus", 2, "--dist-url", "auto"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
slow = pytest.mark.slow
exhaustive = pytest.mark.exhaustive


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks cannot share one GPU")
@pytest.mark.parametrize(
    ("launcher", "options", "number", "whole_group", "statuses"),
    [
        pytest.param([], [], signal.SIGTERM, True, {143}, marks=slow),
        pytest.param([], [], signal.SIGINT, True, {130}, marks=exhaustive),
        pytest.param([], [], signal.SIGUSR2, True, {140}, marks=exhaustive),
        pytest.param([], RANKS, signal.SIGTERM, False, {143}, marks=exhaustive),
        pytest.param([], RANKS, signal.SIGINT, True, {130}, marks=exhaustive),
        pytest.param([], RANKS, signal.SIGINT, False, {130}, marks=exhaustive),
        pytest.param([], RANKS, signal.SIGUSR2, True, {140}, marks=exhaustive),
        pytest.param(TORCHRUN, [], signal.SIGTERM, False, {1, 143}, marks=exhaustive),
        pytest.param(TORCHRUN, [], signal.SIGTERM, True, {1, 143}, marks=exhaustive),
    ],
)
def test_commands_end_with_a_checkpoint_and_leave_no_process(
    coins, tmp_path, launcher, options, number, whole_group, statuses
):
    """With workers of the loader. A terminal, or Slurm, signals all processes of a job."""
    cfg = tiny_cfg("mask_rcnn")
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("cli_train",), ()
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER = 2, 5000
    cfg.DATALOADER.NUM_WORKERS = 2
    cfg.OUTPUT_DIR = str(tmp_path / "output")
    (tmp_path / "config.yaml").write_text(cfg.dump())
    command = [sys.executable, "-W", "ignore", *launcher, TRAIN_NET, *options]
    command += ["--config-file", tmp_path / "config.yaml"]
    command += ["--coco", "cli_train", coins / "train.json", coins / "train"]
    with (tmp_path / "printed").open("w") as printed:
        job = subprocess.Popen(
            [str(c) for c in command],
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
    try:
        log = tmp_path / "output" / "log.txt"
        end = time.monotonic() + 120
        while not (log.exists() and "  iter: 19" in log.read_text()):
            assert job.poll() is None, (tmp_path / "printed").read_text()
            assert time.monotonic() < end
            time.sleep(0.1)
        os.killpg(job.pid, number) if whole_group else job.send_signal(number)
        status = job.wait(60)
        shown = (tmp_path / "printed").read_text()
        assert status in statuses, shown
        saved = (tmp_path / "output" / "last_checkpoint").read_text()
        assert saved.startswith("model_00000"), shown
        assert launcher or "Traceback" not in shown
        assert launcher or "\nerror:" not in shown
        end = time.monotonic() + 15  # a worker looks for its rank every 5 s
        while is_there(job.pid):
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
