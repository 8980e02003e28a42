# Copyright (c) the d2_memfit developers.
"""Whatever ends a run, at any moment: the last completed step is saved, and resumed bit by bit."""

import logging
import signal
from pathlib import Path

import pytest
import torch
from detectron2.data import build_detection_train_loader
from detectron2.data.samplers import TrainingSampler
from detectron2.engine import hooks
from detectron2.utils import comm
from saving import resumed, trainer_of

from d2_memfit.common.compat import create_ddp_model, without_ddp
from d2_memfit.common.files import temporary_name
from d2_memfit.config.settings import RecoveryOptions
from d2_memfit.engine.checkpoint import MemfitCheckpointer
from d2_memfit.engine.ending import SIGNALS, SaveOnEnding
from d2_memfit.engine.run_state import GatherStates
from d2_memfit.engine.train_loop import AccumulatingTrainer

MAX_ITER = 6


class Injected(Exception):
    pass


class Model(torch.nn.Module):
    """A forward draws random numbers, and changes buffers and a plain number that it depends on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        self.average = 1.0

    def forward(self, batch):
        images = torch.tensor([image["drawn"] for image in batch])
        loss = self.layer(images + torch.rand(len(batch), 2)).square().sum() / self.average
        self.average = 0.9 * self.average + 0.1 * images.sum().item()
        return {"loss": loss}


def draw(image):
    return {**image, "drawn": torch.rand(2).tolist()}


def end_with(cause):
    if cause == "error":
        raise Injected
    if cause == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory")
    for name in cause.split():
        signal.raise_signal(getattr(signal, name))


def add(trainer, moment, act):
    """Let ``act`` be called at a moment of each iteration."""

    def before(owner, name):
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kw: act() or original(*args, **kw))

    if moment == "forward":
        trainer.model.register_forward_pre_hook(lambda *_: act())
    elif moment == "backward":
        next(trainer.model.parameters()).register_hook(lambda _: act())
    elif moment == "loader":
        draw_image = trainer.resumable_batches.images._map_func
        trainer.resumable_batches.images._map_func = lambda image: act() or draw_image(image)
    elif moment == "loss":
        spoil = lambda module, args, losses: {"loss": losses["loss"] * (act() or 1)}  # noqa: E731
        trainer.model.register_forward_hook(spoil)
    elif moment in ("before_step", "after_step"):
        trainer._hooks.insert(0, hooks.CallbackHook(**{moment: lambda _: act()}))
    elif moment == "step":
        before(trainer.optimizer, "step")
    elif moment == "last hook":
        trainer.register_hooks([hooks.CallbackHook(after_step=lambda _: act())])
    else:
        before(trainer, {"start": "_explained", "vote": "_vote"}[moment])


def run(rank, folder, start, moment="", cause="", iteration=None, signalled_rank=0):
    """A run that ends in an iteration, fresh or resumed: its weights, and what it ended with."""
    torch.manual_seed(start + rank)
    dicts = [{"image_id": i, "width": 4 + i % 3, "height": 5} for i in range(23)]
    sampler = TrainingSampler(len(dicts), seed=5)
    loader = build_detection_train_loader(
        dicts, mapper=draw, sampler=sampler, total_batch_size=4, num_workers=0
    )
    torch.manual_seed(7)
    model = create_ddp_model(Model(), broadcast_buffers=False)
    torch.manual_seed(100 * start + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    recovery = RecoveryOptions(output_dir=str(folder))
    trainer = AccumulatingTrainer(model, loader, optimizer, 2, recovery=recovery)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    parts = {"trainer": trainer, "scheduler": scheduler}
    checkpointer = MemfitCheckpointer(model, str(folder), **parts)
    checkpointer.resume_or_load("", resume=start > 0)

    def act():
        if iteration is not None and trainer.iter >= iteration and rank == signalled_rank:
            return float("nan") if cause == "nan" else end_with(cause)
        return None

    trainer.register_hooks(
        [
            GatherStates(),
            hooks.LRScheduler(optimizer, scheduler),
            hooks.EvalHook(2, lambda: (moment == "evaluation" and act()) or {}),
            hooks.PeriodicCheckpointer(checkpointer, 100),
        ]
    )
    if moment == "save":
        periodic = hooks.PeriodicCheckpointer(checkpointer, 1)
        trainer.register_hooks([periodic] if comm.is_main_process() else [])
        checkpointer.tag_last_checkpoint = lambda name, tag=checkpointer.tag_last_checkpoint: (
            act() or tag(name)
        )
    elif moment not in ("", "evaluation"):
        add(trainer, moment, act)
    trainer.register_hooks([SaveOnEnding(checkpointer)])
    before = [signal.getsignal(number) for number in SIGNALS]
    ended_with = None
    try:
        trainer.train(start, MAX_ITER)
    except BaseException as e:
        ended_with = getattr(e, "code", None) or type(e).__name__
    assert [signal.getsignal(number) for number in SIGNALS] == before
    state = without_ddp(model).state_dict() if rank == 0 else dict(model.named_parameters())
    return {name: value.tolist() for name, value in state.items()}, ended_with


@pytest.fixture(autouse=True)
def hangs_up():
    """A terminal that is lost ends a run, also one of tests that nohup has started."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="module")
def straight_weights(tmp_path_factory):
    return run(0, tmp_path_factory.mktemp("straight"), 0)[0]


ROWS = [  # moment, cause, what it ends with, and how many iterations before is saved
    ("loader", "error", "Injected", 1),
    ("start", "memory", "OutOfMemoryError", 1),
    ("forward", "error", "Injected", 1),
    ("forward", "memory", "OutOfMemoryError", 1),
    ("backward", "error", "Injected", 1),
    ("loss", "nan", "FloatingPointError", 1),
    ("vote", "error", "Injected", 1),
    ("before_step", "error", "Injected", 1),
    ("after_step", "error", "Injected", 0),
    ("last hook", "error", "Injected", 0),
    ("evaluation", "error", "Injected", 0),
    ("forward", "SIGINT SIGINT", "KeyboardInterrupt", 1),
    ("forward", "SIGTERM", 143, 0),
    ("loader", "SIGUSR2", 140, 0),
    ("vote", "SIGINT", 130, 0),
    ("backward", "SIGHUP", 129, 0),
    ("step", "SIGINT SIGINT", 130, 0),
    ("save", "SIGTERM", 143, 0),
    ("last hook", "SIGTERM", 143, 0),
    ("evaluation", "SIGTERM", 143, 0),
]


@pytest.mark.parametrize(("moment", "cause", "ends_with", "before"), ROWS)
def test_an_ending_loses_nothing_in_fresh_and_resumed_runs_and_in_the_last_iteration(
    tmp_path, straight_weights, moment, cause, ends_with, before
):
    start = 0
    for iteration in (1, 3, MAX_ITER - 1):
        _, ended = run(0, tmp_path, start, moment, cause, iteration)
        assert ended == ends_with
        done = iteration - before
        saved = (tmp_path / "last_checkpoint").read_text()
        assert saved == f"model_{done:07d}.pth" or (saved, done) == ("model_final.pth", 5)
        start = done + 1
    assert run(0, tmp_path, start) == (straight_weights, None)
    file = torch.load(tmp_path / "model_final.pth", weights_only=True)
    assert file["iteration"] == MAX_ITER - 1


@pytest.mark.parametrize(
    ("moment", "signalled_rank", "after"),
    [("forward", 0, 0), ("forward", 1, 0), ("save", 0, 1), ("last hook", 1, 1)],
)
def test_a_signal_to_one_rank_ends_all_after_the_same_iteration(
    two_ranks, tmp_path, moment, signalled_rank, after
):
    """If the ranks have voted in this one, after the next."""
    expected = two_ranks.run(run, tmp_path / "straight", 0)
    start = 0
    for iteration in (1, MAX_ITER - 1 - after):
        arguments = (moment, "SIGTERM", iteration, signalled_rank)
        ends = two_ranks.run(run, tmp_path / "ended", start, *arguments)
        assert [ended for _, ended in ends] == [143] * 2
        start = iteration + after + 1
        saved = (tmp_path / "ended" / "last_checkpoint").read_text()
        assert saved in (f"model_{start - 1:07d}.pth", "model_final.pth")
    assert two_ranks.run(run, tmp_path / "ended", start) == expected


def ended_toy(folder, *own_hooks):
    """A run that saves only at its end; the error that ends it."""
    trainer, checkpointer = trainer_of(folder, size=50)
    checkpointer.start_run()
    trainer._hooks.clear()
    trainer.register_hooks([*own_hooks, SaveOnEnding(checkpointer)])
    with pytest.raises((Exception, SystemExit)) as e:
        trainer.train(0, 10)
    return trainer, e.value


def at(iteration, act, when="before_step"):
    return hooks.CallbackHook(**{when: lambda t: act(t) if t.iter == iteration else None})


def fail(*args):
    raise Injected


def stop(*args):
    signal.raise_signal(signal.SIGTERM)


def test_weights_that_are_not_finite_and_half_done_steps_are_not_saved(tmp_path, log):
    ended_toy(tmp_path, at(3, lambda t: t.model.weight.data.fill_(float("nan"))), at(3, fail))
    assert "Its state is not saved: the weights are not finite" in log.text
    ended_toy(tmp_path, at(3, lambda t: setattr(t.optimizer, "step", fail)))
    assert "Its state is not saved: the optimizer had not finished its step" in log.text
    ended_toy(tmp_path, at(0, lambda t: setattr(t, "run_step", lambda: t.iter == 3 and fail())))
    assert log.text.count("Its state is not saved: the optimizer had not finished its step") == 2
    assert not list(tmp_path.glob("*.pth"))


def test_in_the_last_iteration_a_run_that_ends_early_is_not_evaluated(tmp_path):
    evaluated = []
    for act, status in ((stop, SystemExit), (fail, Injected)):
        evaluation = hooks.EvalHook(0, lambda: evaluated.append(1))
        assert isinstance(ended_toy(tmp_path, at(9, act, "after_step"), evaluation)[1], status)
        assert resumed(tmp_path, size=50)[1] == 9
    assert not evaluated


def test_a_signal_after_the_last_images_has_its_status_and_the_run_is_complete(tmp_path):
    trainer, error = ended_toy(tmp_path, hooks.CallbackHook(after_train=stop))
    assert (error.code, trainer.iter) == (143, 10)


def test_a_hook_that_fails_at_the_end_hides_no_cause(tmp_path):
    own = hooks.CallbackHook(after_train=lambda _: 1 / 0)
    assert isinstance(ended_toy(tmp_path, at(3, fail), own)[1], Injected)


def test_a_last_save_that_fails_is_said(tmp_path, log):
    full = Path(temporary_name(str(tmp_path / "model_0000003.pth")))
    _, error = ended_toy(
        tmp_path, at(2, lambda _: (full / "full").mkdir(parents=True)), at(3, stop)
    )
    assert error.code == 143
    assert "cannot save the checkpoint" in log.text


@pytest.mark.parametrize("logger", ["d2_memfit", "detectron2"])
def test_a_log_file_of_the_users_has_the_traceback_once(tmp_path, monkeypatch, logger):
    handler = logging.FileHandler(tmp_path / "own.log")
    for name in ("d2_memfit", "detectron2"):  # which may have files of other tests
        monkeypatch.setattr(logging.getLogger(name), "handlers", [handler] * (name == logger))
    assert run(0, tmp_path / "run", 0, "forward", "error", 0)[1] == "Injected"
    assert (tmp_path / "own.log").read_text().count("Traceback (most recent call last)") == 1
