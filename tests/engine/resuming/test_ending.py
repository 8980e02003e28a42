# Copyright (c) the d2_memfit developers.
"""Signals that ask a run to end: in training, in evaluation, on one rank and on two."""

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from detectron2.engine import hooks
from detectron2.evaluation import DatasetEvaluator, inference_on_dataset
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng
from detectron2.utils.logger import setup_logger
from forks import FORKED_RANKS, Forked, run_forked
from resumed import Trainer, coins_cfg, is_there
from saving import Toy, resumed, trainer_of
from tiny import ROOT, parameters, tiny_cfg

from d2_memfit.common.files import temporary_name
from d2_memfit.compat import create_ddp_model
from d2_memfit.engine import AccumulatingTrainer
from d2_memfit.engine.resuming import GatherStates, MemfitCheckpointer, SaveOnEnding
from d2_memfit.engine.resuming.signals import SIGNALS
from d2_memfit.errors import CheckpointError, HostMemoryError, OutOfMemoryError
from d2_memfit.settings import RecoveryOptions


def at(iteration, *numbers, when="before_step"):
    """A hook that sends signals to its own process within an iteration."""

    def send(trainer):
        if trainer.iter == iteration:
            for number in numbers:
                os.kill(os.getpid(), number)

    return hooks.CallbackHook(**{when: send})


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


def stopped_run(folder, *own_hooks, max_iter=10):
    """A run that saves nothing but when it is asked to end; the status it ends with."""
    trainer, checkpointer = trainer_of(folder, size=50)
    trainer._hooks.clear()
    trainer.register_hooks([*own_hooks, SaveOnEnding(checkpointer)])
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


def test_a_signal_saves_no_weights_that_are_not_finite(tmp_path, log):
    def spoil(trainer):
        if trainer.iter == 3:
            trainer.model.weight.data.fill_(float("nan"))

    assert stopped_run(tmp_path, at(3, signal.SIGTERM), hooks.CallbackHook(after_step=spoil)) == 143
    assert not list(tmp_path.glob("*.pth"))
    assert "The state after iteration 3 is not saved: the weights are not finite" in log.text


def test_a_second_sigint_ends_at_once_with_a_checkpoint_of_the_last_step(tmp_path):
    trainer, checkpointer = trainer_of(tmp_path, size=50)
    trainer._hooks.clear()
    trainer.register_hooks([at(3, signal.SIGINT, signal.SIGINT), SaveOnEnding(checkpointer)])
    before = handlers()
    with pytest.raises(KeyboardInterrupt):
        trainer.train(0, 10)
    assert trainer.iter == 3
    assert handlers() == before
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000002.pth"
    assert resumed(tmp_path, size=50)[1] == 2


def test_ctrl_c_ends_at_once_the_second_time_also_after_another_signal(tmp_path):
    trainer, checkpointer = trainer_of(tmp_path, size=50)
    trainer._hooks.clear()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGINT)
    trainer.register_hooks([at(3, *numbers), SaveOnEnding(checkpointer)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train(0, 10)
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000002.pth"


class Injected(Exception):
    pass


def fail(*args):
    raise Injected("injected")


def test_in_the_last_iteration_a_signal_ends_the_run_as_in_any_other(tmp_path):
    """It is saved and not evaluated."""
    evaluated = []
    evaluation = hooks.EvalHook(0, lambda: evaluated.append(1))
    assert stopped_run(tmp_path, at(9, signal.SIGTERM), evaluation) == 143
    assert resumed(tmp_path, size=50)[1] == 9
    assert not evaluated


def test_a_signal_after_the_last_images_has_its_status_and_the_run_is_complete(tmp_path, capfd):
    trainer, checkpointer = trainer_of(tmp_path, size=50)
    send = hooks.CallbackHook(after_train=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    trainer.register_hooks([send, SaveOnEnding(checkpointer)])
    with pytest.raises(SystemExit) as e:
        trainer.train(0, 10)
    assert (e.value.code, trainer.iter) == (143, 10)
    assert "SIGTERM: ended. The run is complete" in capfd.readouterr().err


def test_a_hook_that_fails_after_a_failed_run_does_not_hide_why(tmp_path, log):
    trainer, checkpointer = trainer_of(tmp_path, size=50)
    failing = hooks.CallbackHook(
        before_step=lambda t: t.iter == 3 and fail(), after_train=lambda _: {}["lost"]
    )
    trainer.register_hooks([failing, SaveOnEnding(checkpointer)])
    with pytest.raises(Injected):
        trainer.train(0, 10)
    assert resumed(tmp_path, size=50)[1] == 2
    assert "After the end of the run, a hook failed too: 'lost'" in log.text


def test_a_run_within_the_handling_of_an_error_ends_well(tmp_path, log):
    """As that of a loop which trains again with other keys after an error."""
    evaluated = []
    try:
        fail()
    except Injected:
        trainer, checkpointer = trainer_of(tmp_path, size=50)
        evaluation = hooks.EvalHook(0, lambda: evaluated.append(1))
        trainer.register_hooks([evaluation, SaveOnEnding(checkpointer)])
        trainer.train(0, 3)
    assert evaluated == [1]
    assert "ended the run" not in log.text


def in_forward(trainer, now):
    calls = []

    def count(module, args):
        calls.append(1) if now() else calls.clear()
        if len(calls) == 2:  # within the window
            fail()

    trainer.model.register_forward_pre_hook(count)


def out_of_memory(trainer, now):
    def run_out(module, args):
        if now():
            raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.model.register_forward_pre_hook(run_out)


def in_backward(trainer, now):
    weight = next(p for p in trainer.model.parameters() if p.requires_grad)
    weight.register_hook(lambda gradient: fail() if now() else None)


def with_nan(trainer, now):
    def spoil(module, args, losses):
        return {k: v * float("nan") for k, v in losses.items()} if now() else losses

    trainer.model.register_forward_hook(spoil)


def in_the_loader(trainer, now):
    dataset = trainer._trainer.run_state.batches._received._loader.dataset
    images = dataset._images

    class Images:
        def __getitem__(self, index):
            return fail() if now() else images[index]

    dataset._images = Images()


def in_hooks(before_step=None, after_step=None, place=None):
    def add(trainer, now):
        hook = hooks.CallbackHook(
            before_step=before_step and (lambda _: now() and fail()),
            after_step=after_step and (lambda _: now() and fail()),
        )
        trainer.register_hooks([hook])
        if place is not None:
            trainer._hooks.insert(place, trainer._hooks.pop())

    return add


class Failing(DatasetEvaluator):
    process = fail


def in_an_evaluator(trainer, now):
    images = [[{"image": torch.zeros(3, 64, 64, dtype=torch.uint8), "height": 64, "width": 64}]]

    def evaluate():
        return inference_on_dataset(trainer.model, images, Failing()) if now() else {}

    trainer.register_hooks([hooks.EvalHook(1, evaluate)])
    trainer._hooks.insert(0, trainer._hooks.pop())


def out_of_memory_in(name):
    """At an edge of the window, where no images can be run again."""

    def add(trainer, now):
        *path, last = name.split(".")
        part = functools.reduce(getattr, path, trainer._trainer)
        original = getattr(part, last)

        def run_out(*args, **kwargs):
            if now():
                raise torch.OutOfMemoryError("CUDA out of memory")
            return original(*args, **kwargs)

        setattr(part, last, run_out)

    return add


def in_the_step(trainer, now):
    step = trainer.optimizer.step

    def half(*args, **kwargs):
        if now():
            trainer.optimizer.param_groups[0]["params"][0].data.add_(1)
            fail()
        return step(*args, **kwargs)

    trainer.optimizer.step = half


LAST = 5
ERRORS = {
    "forward": (in_forward, Injected, 1),
    "backward": (in_backward, Injected, 1),
    "NaN": (with_nan, FloatingPointError, 1),
    "memory": (out_of_memory, torch.OutOfMemoryError, 1),
    "loader": (in_the_loader, Injected, 1),
    "hook before a step": (in_hooks(before_step=True), Injected, 1),
    "first hook after a step": (in_hooks(after_step=True, place=0), Injected, 0),
    "last hook after a step": (in_hooks(after_step=True), Injected, 0),
    "evaluator": (in_an_evaluator, Injected, 0),
}
# The others are outside the window, where MEMFIT.OOM.POLICY changes nothing.
_DIFFER_BY_POLICY = ("forward", "NaN", "memory", "last hook after a step")
EDGES = {
    phase: (out_of_memory_in(name), OutOfMemoryError, 1)
    for phase, name in [
        ("start", "run_state.undo_point"),
        ("window", "counts.prepare"),
    ]
}


def run_until(cfg, iteration, add_error=None, error=None):
    """A run that an error ends in an iteration, if it is not the last; its weights."""
    is_fresh = not (Path(cfg.OUTPUT_DIR) / "last_checkpoint").exists()
    seed_all_rng(0 if is_fresh else iteration)
    trainer = Trainer(cfg)
    trainer.resume_or_load(resume=True)
    if add_error is None:
        trainer.train()
    else:
        add_error(trainer, lambda: trainer.iter == iteration)
        with pytest.raises(error):
            trainer.train()
    return parameters(trainer.model)


@pytest.fixture(scope="module")
def straight_weights(coins, tmp_path_factory):
    """The weights of a run that nothing ends, by its keys."""

    @functools.cache
    def weights(**keys):
        return run_until(coins_cfg(tmp_path_factory.mktemp("straight"), "retinanet", **keys), LAST)

    return weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "keys"),
    [
        *((place, {"MEMFIT.OOM.POLICY": "split"}) for place in [*ERRORS, *EDGES]),
        *(
            pytest.param(
                place, {}, marks=[] if place in _DIFFER_BY_POLICY else pytest.mark.exhaustive
            )
            for place in ERRORS
        ),
        ("backward", {"DATALOADER.NUM_WORKERS": 2}),  # they do not know of the iteration
        *(
            pytest.param(place, {"DATALOADER.NUM_WORKERS": 2}, marks=pytest.mark.exhaustive)
            for place in ("forward", "NaN")
        ),
    ],
)
def test_an_error_loses_nothing_in_fresh_and_resumed_runs(
    coins, straight_weights, tmp_path, place, keys, log
):
    """Batch statistics, RetinaNet's running normaliser, random numbers: all go on to the bit."""
    keys = {
        **keys,
        "SOLVER.ACCUMULATION_STEPS": 2,
        "SOLVER.CHECKPOINT_PERIOD": 100,
        "SOLVER.MAX_ITER": LAST,
        "MODEL.RESNETS.NORM": "BN",
        "MODEL.BACKBONE.FREEZE_AT": 0,
    }
    straight = straight_weights(**keys)
    add_error, error, before = {**ERRORS, **EDGES}[place]
    cfg = coins_cfg(tmp_path / "ended", "retinanet", **keys)
    last = tmp_path / "ended" / "last_checkpoint"
    for iteration in (1, 3):
        run_until(cfg, iteration, add_error, error)
        assert last.read_text() == f"model_{iteration - before:07d}.pth"
    assert ("What to do: docs/OUT_OF_MEMORY.md" in log.text) == ("emory" in error.__name__)
    assert ("Fix the cause before you resume" in log.text) == (error is FloatingPointError)
    if place in EDGES:
        records = (tmp_path / "ended" / "memfit_oom.jsonl").read_text().splitlines()
        assert [json.loads(record)["phase"] for record in records] == [place] * 2
    weights = run_until(cfg, LAST)
    torch.testing.assert_close(weights, straight, rtol=0, atol=0)


@pytest.mark.slow
def test_an_iteration_that_cannot_begin_loses_no_step(coins, tmp_path, log):
    def at_the_start(trainer, now):
        undo_point = trainer._trainer.run_state.undo_point
        trainer._trainer.run_state.undo_point = lambda **kw: fail() if now() else undo_point(**kw)

    run_until(coins_cfg(tmp_path, "retinanet"), 3, at_the_start, Injected)
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000002.pth"
    assert "The state after iteration 2 is in" in log.text


@pytest.mark.slow
def test_an_error_between_hooks_and_step_loses_no_step(coins, tmp_path, log):
    """There PyTorch may say, as anywhere, that a worker was killed."""

    def before_the_step(trainer, now):
        trainer._trainer.check_train = lambda: now() and fail()

    run_until(coins_cfg(tmp_path, "retinanet"), 3, before_the_step, Injected)
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000002.pth"
    assert "The state after iteration 2 is in" in log.text


@pytest.mark.slow
def test_a_worker_that_is_told_to_be_killed_while_the_run_ends_costs_no_step(
    coins, tmp_path, log, monkeypatch
):
    """Its connection breaks first, and PyTorch's handler raises, once, where the state is saved."""

    def before_the_step(trainer, now):
        trainer._trainer.check_train = lambda: now() and fail()

    def raise_once():
        monkeypatch.undo()
        raise RuntimeError("DataLoader worker (pid 9310) is killed by signal: Killed. ")

    monkeypatch.setattr("d2_memfit.engine.resuming.ending.raising_handlers_held_back", raise_once)
    run_until(coins_cfg(tmp_path, "retinanet"), 3, before_the_step, HostMemoryError)
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000002.pth"
    assert "The state after iteration 2 is in" in log.text


def test_a_step_of_a_project_s_own_that_fails_halfway_is_not_saved(coins, tmp_path, log):
    """It may have changed some weights: how far it was, nobody knows."""

    def own_step(trainer, now):
        def run_step():
            batch = next(trainer._trainer._data_loader_iter)
            sum(trainer.model(batch).values()).backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            if now():
                fail()

        trainer.run_step = run_step

    plain = {"MEMFIT.OOM.POLICY": "raise", "SOLVER.ACCUMULATION_STEPS": 1}
    cfg = coins_cfg(tmp_path, "retinanet", **plain)
    run_until(cfg, 3, own_step, Injected)
    assert not (tmp_path / "last_checkpoint").exists()
    assert "this trainer's own run_step does not tell how much of the step is done" in log.text


@pytest.mark.slow
def test_a_half_done_step_is_not_saved(coins, tmp_path, log):
    cfg = coins_cfg(tmp_path, "retinanet", **{"SOLVER.CHECKPOINT_PERIOD": 2})
    run_until(cfg, 3, in_the_step, Injected)
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000001.pth"
    assert "Injected ended the run in iteration 3. Its state is not saved: the opt" in log.text


@pytest.mark.slow
def test_weights_that_are_not_finite_are_not_saved(coins, tmp_path, log):
    def spoil(trainer, now):
        weight = next(p for p in trainer.model.parameters() if p.requires_grad)
        hook = hooks.CallbackHook(before_step=lambda _: now() and weight.data.fill_(float("inf")))
        trainer.register_hooks([hook])

    cfg = coins_cfg(tmp_path, "retinanet", **{"SOLVER.CHECKPOINT_PERIOD": 2})
    run_until(cfg, 3, spoil, FloatingPointError)
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000001.pth"
    assert "Its state is not saved: the weights are not finite" in log.text


@pytest.mark.slow
def test_the_traceback_is_in_the_file_alone(coins, tmp_path, capfd):
    cfg = coins_cfg(tmp_path, "retinanet")
    names = ("d2_memfit", "detectron2")
    former = [logging.getLogger(name).handlers for name in names]
    for name in names:
        logging.getLogger(name).handlers = []
        setup_logger(str(tmp_path), name=name)
    try:
        run_until(cfg, 1, in_backward, Injected)
    finally:
        for name, handlers_of_name in zip(names, former):
            logging.getLogger(name).handlers = handlers_of_name
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    assert (tmp_path / "log.txt").read_text().count("Traceback") == 1


def test_a_handler_that_is_there_is_left_alone(tmp_path, log):
    came = []
    former = signal.signal(signal.SIGUSR2, lambda number, frame: came.append(number))
    try:
        trainer, checkpointer = trainer_of(tmp_path, size=50)
        trainer.register_hooks([at(3, signal.SIGUSR2), SaveOnEnding(checkpointer)])
        trainer.train(0, 10)
    finally:
        signal.signal(signal.SIGUSR2, former)
    assert came == [signal.SIGUSR2]
    assert trainer.iter == 10
    assert "SIGUSR2 has a handler already, which is left alone" in log.text


@pytest.mark.parametrize("has_room", [True, False])
def test_a_folder_that_is_removed_is_made_again_for_the_save(tmp_path, log, has_room):
    folder = tmp_path / "output"
    folder.mkdir()

    def remove(trainer):
        if trainer.iter == 3:
            shutil.rmtree(folder)
            if not has_room:
                folder.write_text("a file")

    trainer, checkpointer = trainer_of(folder, size=50)
    checkpointer.start_run()
    trainer._hooks.clear()
    own_hooks = [hooks.CallbackHook(before_step=remove), at(3, signal.SIGTERM)]
    trainer.register_hooks([*own_hooks, SaveOnEnding(checkpointer)])
    with pytest.raises(SystemExit if has_room else CheckpointError, match=r"143|File exists"):
        trainer.train(0, 10)
    if has_room:
        assert "was removed, and is created again" in log.text
        assert resumed(folder, size=50)[1] == 3


class Counting(Trainer):
    evaluated = 0

    @classmethod
    def test(cls, cfg, model, evaluators=None):
        Counting.evaluated += 1
        return {}


@pytest.mark.slow
@pytest.mark.parametrize("period", [LAST, 100], ids=["after another save", "alone"])
def test_a_last_save_that_failed_is_made_when_the_run_is_resumed(coins, tmp_path, period):
    keys = {"SOLVER.CHECKPOINT_PERIOD": period, "SOLVER.MAX_ITER": LAST}
    cfg = coins_cfg(tmp_path, "retinanet", **keys)
    full = Path(temporary_name(str(tmp_path / "model_final.pth"))) / "full"
    Counting.evaluated = 0
    for is_full in (True, True, False):  # then there is room
        trainer = Counting(cfg)
        trainer.resume_or_load(resume=True)
        add_error = hooks.CallbackHook(before_train=lambda _: full.mkdir(parents=True))
        trainer.register_hooks([add_error] if is_full else [])
        with pytest.raises(CheckpointError) if is_full else contextlib.nullcontext():
            trainer.train()
        shutil.rmtree(full.parent, ignore_errors=True)
    assert torch.load(tmp_path / "model_final.pth", weights_only=True)["iteration"] == LAST - 1
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"
    assert Counting.evaluated == 1


def test_a_checkpoint_that_cannot_be_saved_then_is_an_error(tmp_path):
    (Path(temporary_name(str(tmp_path / "model_0000003.pth"))) / "full").mkdir(parents=True)
    trainer, checkpointer = trainer_of(tmp_path, size=50)
    checkpointer._has_started = True
    trainer._hooks.clear()
    trainer.register_hooks([at(3, signal.SIGTERM), SaveOnEnding(checkpointer)])
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
    trainer.register_hooks([hooks.EvalHook(period, evaluation), SaveOnEnding(checkpointer)])
    before = handlers()
    with pytest.raises(SystemExit) as e:
        trainer.train(0, 6)
    assert e.value.code == 143
    assert (evaluation.seen, evaluation.ended) == (4, 0)
    assert type(trainer.model) is Toy
    assert handlers() == before
    assert resumed(tmp_path, size=50)[1] == (1 if period else 5)


class Saving(MemfitCheckpointer):
    """Gets a signal within the save of an iteration, ``signalled``."""

    signalled = -1

    def tag_last_checkpoint(self, last_filename_basename):
        if last_filename_basename == f"model_{self.signalled:07d}.pth":
            os.kill(os.getpid(), signal.SIGTERM)
        super().tag_last_checkpoint(last_filename_basename)


def end_at(rank, folder, place, last, signalled_rank=0):
    """A run, fresh or resumed, that gets a signal at a place of an iteration.

    Returns:
        The status, how many evaluations were completed, and the next random number.
    """
    is_signalled = rank == signalled_rank
    model = create_ddp_model(Toy(50), broadcast_buffers=False)
    trainer = AccumulatingTrainer(
        model,
        iter(lambda: [{}, {}], None),
        torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9),
        recovery=RecoveryOptions(),
    )
    checkpointer = Saving(model, str(folder), trainer=trainer)
    start = checkpointer.resume_or_load("", resume=True).get("iteration", -1) + 1
    assert start == 0 or last > 3
    evaluation = Batches(model, 2000, signalled=4 if is_signalled else None, wait_s=0.01)
    failed = []

    def run_out(model, args):
        if trainer.iter == last and is_signalled and not failed:
            failed.append(args)
            os.kill(os.getpid(), signal.SIGTERM)
            raise torch.OutOfMemoryError("CUDA out of memory")

    draw = hooks.CallbackHook(after_step=lambda _: torch.rand(1))  # when the ranks have voted
    trainer.register_hooks([draw])
    if is_signalled and place in ("save", "last save"):
        checkpointer.signalled = last  # if it is this rank's
    if place == "save":
        trainer.register_hooks([GatherStates(), hooks.PeriodicCheckpointer(checkpointer, 1)])
        if signalled_rank:  # while the first one saves
            trainer.register_hooks([at(last, signal.SIGTERM, when="after_step")])
    elif place == "evaluation":
        trainer.register_hooks([hooks.EvalHook(last + 1, evaluation)])
    elif place == "recovery":
        model.register_forward_pre_hook(run_out)
    elif is_signalled:
        trainer.register_hooks([at(last, signal.SIGTERM, signal.SIGTERM)])
    trainer.register_hooks([SaveOnEnding(checkpointer)])
    with pytest.raises(SystemExit) as e:
        trainer.train(start, 10)
    return e.value.code, evaluation.ended, torch.rand(1)


def next_number(states):
    generator = torch.Generator()
    generator.set_state(states["random_states"]["torch"])
    return torch.rand(1, generator=generator)


@pytest.mark.parametrize("place", ["iteration", "recovery", "save", "last save", "evaluation"])
def test_a_signal_at_any_place_ends_fresh_and_resumed_runs_after_the_iteration(tmp_path, place):
    before = handlers()
    for last in (3, 6):
        assert end_at(0, tmp_path, place, last)[:2] == (143, 0)
        assert (tmp_path / "last_checkpoint").read_text() == f"model_{last:07d}.pth"
        assert resumed(tmp_path, size=50)[1] == last  # which looks at the weights
    assert handlers() == before


@pytest.mark.parametrize(
    ("place", "signalled_rank"),
    [
        *((place, rank) for place in ("recovery", "save", "evaluation") for rank in (0, 1)),
        ("last save", 0),  # the other one has none
    ],
)
def test_a_signal_to_a_rank_at_any_place_ends_fresh_and_resumed_runs(
    two_ranks, tmp_path, place, signalled_rank
):
    for last in (3, 6):
        ends = two_ranks.run(end_at, tmp_path, place, last, signalled_rank)
        assert [end[:2] for end in ends] == [(143, 0)] * 2
        ended = last + (place == "save")  # the ranks have voted
        saved = (tmp_path / "last_checkpoint").read_text()
        assert saved == f"model_{ended:07d}.pth"
        checkpoint = torch.load(tmp_path / saved, weights_only=True)
        ranks = checkpoint["trainer"]["run"]["ranks"]
        assert [next_number(states) for states in ranks] == [number for _, _, number in ends]
        assert resumed(tmp_path, size=50)[1] == ended


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
    trainer.register_hooks([*own, SaveOnEnding(checkpointer)])
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
    options = [{"batches": 2000, "wait_s": 0.01}, {"batches": 2000, "wait_s": 0.01}]
    options[signalled_rank]["signalled"] = 3
    ends = two_ranks.run(stop_on_ranks, tmp_path, None, options, 10)
    assert [(status, iteration) for status, iteration, _ in ends] == [(143, 1)] * 2
    assert all(seen < 1000 and not ended for _, _, (seen, ended) in ends)
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000001.pth"


@pytest.mark.parametrize("signalled_rank", [0, 1])
def test_a_rank_that_waits_for_the_others_results_gets_them(two_ranks, tmp_path, signalled_rank):
    options = [{"batches": 1}, {"batches": 1}]
    options[signalled_rank] = {"batches": 60, "wait_s": 0.01, "signalled": 40}
    ends = two_ranks.run(stop_on_ranks, tmp_path, None, options, 10)
    assert [(status, iteration) for status, iteration, _ in ends] == [(143, 2)] * 2
    assert all(ended == 1 for _, _, (_, ended) in ends)
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000002.pth"


TRAIN_NET = ROOT / "tools" / "train_net.py"
RANKS = ["--num-gpus", 2, "--dist-url", "auto"]
NO_WORKERS = ["DATALOADER.NUM_WORKERS", 0]
FORKED = ["-c", FORKED_RANKS]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
TIME_LIMIT_S = 240  # a machine may be busy with other things
NUM_SEEN = 10  # iterations before a command is ended
slow = pytest.mark.slow
long = pytest.mark.long
exhaustive = pytest.mark.exhaustive


def ranks_of(job):
    """The processes of a command that train and have workers; itself if it started none."""
    return [child for child in job.children() if child.children()] or [job]


def send(number, target, job):
    process = psutil.Process(job.pid)
    if target == "all":  # torchrun's ranks have groups of their own
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)
    elif target == "rank 1":
        ranks_of(process)[1].send_signal(number)
    elif target == "worker":
        ranks_of(process)[-1].children()[-1].send_signal(number)
    else:
        process.send_signal(number)


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks cannot share one GPU")
@pytest.mark.parametrize(
    ("launcher", "options", "number", "target", "statuses"),
    [
        pytest.param([], [], signal.SIGTERM, "all", {143}, marks=slow),
        pytest.param([], [], signal.SIGINT, "all", {130}, marks=exhaustive),
        pytest.param([], [], signal.SIGUSR2, "all", {140}, marks=exhaustive),
        pytest.param([], [], signal.SIGHUP, "all", {129}, marks=exhaustive),
        pytest.param([], NO_WORKERS, signal.SIGTERM, "all", {143}, marks=exhaustive),
        pytest.param([], [], signal.SIGKILL, "worker", {2}, marks=slow),
        pytest.param([], RANKS, signal.SIGTERM, "job", {143}, marks=exhaustive),
        pytest.param([], RANKS, signal.SIGINT, "all", {130}, marks=exhaustive),
        pytest.param([], RANKS, signal.SIGINT, "job", {130}, marks=exhaustive),
        pytest.param([], RANKS, signal.SIGUSR2, "all", {140}, marks=exhaustive),
        pytest.param([], RANKS, signal.SIGHUP, "all", {129}, marks=exhaustive),
        pytest.param([], RANKS, signal.SIGTERM, "rank 1", {143}, marks=exhaustive),
        pytest.param([], RANKS + NO_WORKERS, signal.SIGINT, "all", {130}, marks=exhaustive),
        pytest.param(FORKED, RANKS, signal.SIGKILL, "rank 1", {137}, marks=[slow, long]),
        pytest.param([], RANKS, signal.SIGKILL, "job", {-9}, marks=exhaustive),
        pytest.param([], RANKS, signal.SIGKILL, "worker", {2}, marks=exhaustive),
        pytest.param(TORCHRUN, [], signal.SIGTERM, "job", {1, 143}, marks=exhaustive),
        pytest.param(TORCHRUN, [], signal.SIGTERM, "all", {1, 143}, marks=exhaustive),
        pytest.param(TORCHRUN, NO_WORKERS, signal.SIGINT, "all", {1, 130}, marks=exhaustive),
        pytest.param(TORCHRUN, [], signal.SIGHUP, "job", {1, 129}, marks=exhaustive),
        pytest.param(TORCHRUN, [], signal.SIGHUP, "all", {1, 129}, marks=exhaustive),
        pytest.param(TORCHRUN, [], signal.SIGUSR2, "rank 1", {1}, marks=exhaustive),
        pytest.param(TORCHRUN, [], signal.SIGUSR2, "job", {-12}, marks=exhaustive),
        pytest.param(TORCHRUN, [], signal.SIGUSR2, "all", {-12}, marks=exhaustive),
        pytest.param(TORCHRUN, [], signal.SIGKILL, "rank 1", {1}, marks=exhaustive),
        pytest.param(TORCHRUN, [], signal.SIGKILL, "worker", {1}, marks=exhaustive),
    ],
)
def test_fresh_and_resumed_commands_end_with_a_checkpoint_and_leave_no_process(
    coins, tmp_path, launcher, options, number, target, statuses
):
    """With workers of the loader. A terminal, or Slurm, signals all processes of a job."""
    cfg = tiny_cfg("mask_rcnn", fpn=False)
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("cli_train",), ()
    cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER = 2, 5000
    cfg.DATALOADER.NUM_WORKERS = 2
    cfg.OUTPUT_DIR = str(tmp_path / "output")
    (tmp_path / "config.yaml").write_text(cfg.dump())
    command = [*launcher, TRAIN_NET, "--resume"]
    command += ["--config-file", tmp_path / "config.yaml"]
    command += ["--coco", "cli_train", coins / "train.json", coins / "train", *options]
    reached = []
    for _ in range(2):  # fresh, then resumed
        shown = ended_command(command, tmp_path, partial(send, number, target), statuses)
        saved = (tmp_path / "output" / "last_checkpoint").read_text()
        reached.append(int(re.fullmatch(r"model_(\d{7})\.pth", saved)[1]))
        if launcher is not TORCHRUN:  # which has a traceback and a line of its own
            assert "Traceback" not in shown
            assert "error:" not in shown or number == signal.SIGKILL
            if number == signal.SIGKILL:
                what = {
                    "rank 1": "rank 1 of this machine was ended with SIGKILL",
                    "worker": "a worker was killed|killed by signal: Killed",
                    "job": "SIG(INT|TERM): ending after iteration",  # its ranks have noticed
                }[target]
                assert re.search(what, shown)
    first, second = reached
    assert second >= first + NUM_SEEN - 1, shown


@pytest.mark.slow
def test_an_image_that_cannot_be_read_ends_a_command_with_one_line_and_a_checkpoint(
    coins, tmp_path
):
    """While it trains, as on a disk that fails; then it is resumed, and again."""
    shutil.copytree(coins, tmp_path / "coins")
    keys = {"SOLVER.MAX_ITER": 5000, "SOLVER.ACCUMULATION_STEPS": 1}
    cfg = coins_cfg(tmp_path / "output", "retinanet", **keys)
    cfg.DATASETS.TRAIN, cfg.DATALOADER.NUM_WORKERS = ("cli_train",), 2
    (tmp_path / "config.yaml").write_text(cfg.dump())
    command = [TRAIN_NET, "--resume"]
    command += ["--config-file", tmp_path / "config.yaml"]
    command += ["--coco", "cli_train", tmp_path / "coins/train.json", tmp_path / "coins/train"]
    pictures = list((tmp_path / "coins" / "train").iterdir())
    for start in (0, NUM_SEEN):

        def spoil(job):
            for picture in pictures:
                picture.write_bytes(b"no picture")

        shown = ended_command(command, tmp_path, spoil, {1, 2})
        assert "Traceback" not in shown
        assert "cannot" in shown.splitlines()[-1]
        assert shown.splitlines()[-1].startswith("error: ")
        saved = (tmp_path / "output" / "last_checkpoint").read_text()
        assert int(re.fullmatch(r"model_(\d{7})\.pth", saved)[1]) >= start
        for picture in pictures:
            shutil.copy(coins / "train" / picture.name, picture)


FAILING_EVALUATOR = """
from detectron2.evaluation import COCOEvaluator
from detectron2.utils import comm

def process(self, inputs, outputs):
    if comm.get_rank() == comm.get_world_size() - 1:
        raise ValueError("injected")

COCOEvaluator.process = process
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], RANKS], ids=["one process", "two ranks"])
def test_an_error_in_an_evaluator_ends_a_command_with_one_line_and_a_checkpoint(
    coins, tmp_path, options
):
    """On the last rank, in fresh and resumed runs."""
    keys = {"TEST.EVAL_PERIOD": 2, "SOLVER.ACCUMULATION_STEPS": 1}
    cfg = coins_cfg(tmp_path / "output", "retinanet", **keys)
    cfg.DATASETS.TRAIN = cfg.DATASETS.TEST = ("cli_train",)
    (tmp_path / "config.yaml").write_text(cfg.dump())
    command = ["-c", FAILING_EVALUATOR + FORKED_RANKS, TRAIN_NET, "--resume"]
    command += ["--config-file", tmp_path / "config.yaml"]
    command += ["--coco", "cli_train", coins / "train.json", coins / "train", *options]
    for last in (1, 3):
        run = run_forked(*command, timeout_s=TIME_LIMIT_S)
        shown = run.stdout + run.stderr
        assert run.returncode == 1, shown
        assert "Traceback" not in shown
        errors = [line for line in shown.splitlines() if line.startswith("error: ")]
        assert errors == ["error: ValueError: injected"]
        assert (tmp_path / "output" / "last_checkpoint").read_text() == f"model_{last:07d}.pth"


def ended_command(command, folder, end_it, statuses):
    """What a command printed that was ended within its iterations, and left no process.

    It ends within 15 seconds. If the machine is busy, it may take as long as it took to start.
    """
    (folder / "printed").write_text("")
    start = time.monotonic()
    job = Forked(command, folder / "printed")
    try:
        while (folder / "printed").read_text().count(
            "  iter: "
        ) <= NUM_SEEN:  # each of the first 20
            assert job.poll() is None, (folder / "printed").read_text()
            assert time.monotonic() < start + TIME_LIMIT_S
            time.sleep(0.1)
        end = time.monotonic()
        processes = psutil.Process(job.pid).children(recursive=True)
        end_it(job)
        status = job.wait(TIME_LIMIT_S)
        assert status in statuses, (folder / "printed").read_text()
        psutil.wait_procs(processes, TIME_LIMIT_S)
        assert not is_there(job.pid)
        shown = (folder / "printed").read_text()
        assert time.monotonic() - end < max(15, end - start), shown
        return shown
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
