# Copyright (c) the d2_memfit developers.
"""What ends a run outside of its iterations: at its start, its last save, its last evaluation."""

import contextlib
import functools
import itertools
import os
import re
import signal
import time

import pytest
import torch
from forks import FORKED_RANKS, Forked
from resumed import coins_cfg, is_there
from tiny import ROOT

LAST = 3  # iteration
TIME_LIMIT_S = 240  # a machine may be busy with other things
RANKS = ["--num-gpus", 2, "--dist-url", "auto"]
TRAIN_NET = ROOT / "tools" / "train_net.py"
KEYS = {
    "SOLVER.ACCUMULATION_STEPS": 1,
    "SOLVER.MAX_ITER": LAST + 1,
    "SOLVER.CHECKPOINT_PERIOD": 100,
    "DATASETS.TRAIN": ("cli_train",),
    "DATASETS.TEST": ("cli_train",),
    "DATALOADER.NUM_WORKERS": 1,
}

# Ends the run once, at a moment of one rank.
INJECTION = """
import multiprocessing, os, signal, time
from pathlib import Path

import torch
from detectron2.evaluation import COCOEvaluator
from detectron2.utils import comm
from d2_memfit.engine import AccumulatingTrainer, MemfitMixin
from d2_memfit.engine import SaveOnEnding

moment, kind, rank, last, done = os.environ["INJECTION"].split(":")

def end_here(now):
    if now != moment or comm.get_rank() != int(rank) or Path(done).exists():
        return
    Path(done).write_text(str(time.time()))
    if kind == "error":
        raise ValueError("injected")
    if kind == "worker":
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        time.sleep(5)  # PyTorch's handler raises in it
    else:
        os.kill(os.getpid(), getattr(signal, kind))
        time.sleep(0.1)

def at(owner, name, moment_of):
    original = getattr(owner, name)

    def replacement(*args, **kwargs):
        end_here(moment_of(*args))
        return original(*args, **kwargs)

    setattr(owner, name, replacement)

def at_last(text):
    return lambda hook, *_: text if getattr(hook, "trainer", hook).iter == int(last) else ""

def is_last(state):
    return isinstance(state, dict) and state.get("iteration") == int(last)

at(MemfitMixin, "_complete", lambda *_: "start")
at(AccumulatingTrainer, "run_step", at_last("last iteration"))
at(SaveOnEnding, "after_step", at_last("last hook"))
at(torch, "save", lambda state, *_: "last save" if is_last(state) else "")
at(COCOEvaluator, "process", lambda *_: "evaluation")
at(COCOEvaluator, "evaluate", lambda *_: "results")
"""

# TorchScript optimises a function after its first call, so a resumed run would differ in a bit.
EAGER = """
from detectron2.modeling.meta_arch import retinanet
from fvcore.nn import sigmoid_focal_loss

retinanet.sigmoid_focal_loss_jit = sigmoid_focal_loss
"""

LOST = "error: the connection to another rank is lost"
KILLED = "error: rank 1 of this machine was ended with SIGKILL"
WORKER = "error: .*a worker was killed"
STATUSES = {"error": 1, "worker": 2, "SIGTERM": 143, "SIGINT": 130, "SIGKILL": 137}
LINES = {
    "error": "error: ValueError: injected",
    "worker": WORKER,
    "SIGTERM": "SIGTERM: end|error: rank 1 of this machine was ended with SIGTERM",
    "SIGINT": "SIGINT: end",
    "SIGKILL": KILLED,
}
long, exhaustive = pytest.mark.long, pytest.mark.exhaustive


def command_of(folder, coins, name, ranks, **keys):
    cfg = coins_cfg(folder / name, "retinanet", **KEYS, **keys)
    (folder / f"{name}.yaml").write_text(cfg.dump())
    options = ["--config-file", folder / f"{name}.yaml", "--resume"]
    data = ["--coco", "cli_train", coins / "train.json", coins / "train"]
    return [TRAIN_NET, *options, *data, *(RANKS if ranks > 1 else [])]


def run_command(command, printed, injection):
    """The status of a command, what it printed, and the seconds after the injection."""
    job = Forked(
        ["-c", EAGER + (INJECTION if injection else "") + FORKED_RANKS, *command],
        printed,
        env={"INJECTION": injection, "OMP_NUM_THREADS": "1"},
    )
    try:
        status = job.wait(TIME_LIMIT_S)
        ended = time.time()
        while is_there(job.pid):  # its workers, if it was killed
            assert time.time() < ended + TIME_LIMIT_S
            time.sleep(0.1)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    return status, printed.read_text(), ended


@pytest.fixture(scope="module")
def straight_runs(coins, tmp_path_factory):
    """Weights, and seconds, of runs that nothing ends."""

    @functools.cache
    def run(ranks):
        folder = tmp_path_factory.mktemp("straight")
        start = time.time()
        status, shown, end = run_command(
            command_of(folder, coins, "run", ranks), folder / "printed", ""
        )
        assert status == 0, shown
        return final_weights(folder / "run"), end - start

    return run


def final_weights(folder):
    return torch.load(folder / "model_final.pth", weights_only=True)["model"]


MOMENTS = ["start", "last iteration", "last hook", "last save", "evaluation", "results"]
CASES = [
    *itertools.product(MOMENTS, ["error", "SIGTERM", "SIGINT", "worker"], [1]),
    *itertools.product(MOMENTS, ["error", "SIGTERM", "worker", "SIGKILL"], [2]),
]
LONG = [
    ("last iteration", "worker", 1),
    ("last save", "worker", 1),
    ("results", "SIGTERM", 1),
    ("start", "SIGKILL", 2),
    ("last iteration", "error", 2),
    ("evaluation", "error", 2),
]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks cannot share one GPU")
@pytest.mark.parametrize(
    ("moment", "kind", "ranks"),
    [pytest.param(*c, marks=long if c in LONG else [long, exhaustive]) for c in CASES],
)
def test_at_each_moment_a_command_ends_with_a_line_and_goes_on_to_the_same_weights(
    coins, straight_runs, tmp_path, moment, kind, ranks
):
    if (moment, kind) == ("start", "worker"):
        pytest.skip("there are no workers yet")
    expected, straight_s = straight_runs(ranks)
    rank = 0 if moment == "last save" and kind != "SIGKILL" else ranks - 1
    if (moment, rank) == ("last save", 1):
        moment = "last hook"  # the other rank saves at that time
    folder, done = tmp_path / "run", tmp_path / "done"
    command = command_of(tmp_path, coins, "run", ranks)
    status, shown, ended = run_command(
        command, tmp_path / "printed", f"{moment}:{kind}:{rank}:{LAST}:{done}"
    )
    assert status == STATUSES[kind], shown
    assert "Traceback" not in shown
    lines = [line for line in shown.splitlines() if re.search("error: |SIG[A-Z]+: end", line)]
    assert len([line for line in lines if re.search(LINES[kind], line)]) == 1, shown
    # The other rank sees the connection end, or is ended by the launcher.
    of_other_rank = [line for line in lines if re.search(f"{LOST}|WARNING.*SIGTERM: end", line)]
    assert len(lines) == 1 or (ranks == len(lines) == 2 and of_other_rank), lines
    # A loaded machine may need as long as for a whole run.
    assert ended - float(done.read_text()) < max(15, straight_s), shown
    steps = {"start": 0, "last iteration": LAST - (kind != "SIGTERM" and kind != "SIGINT")}
    done_steps = steps.get(moment, LAST)
    if moment == "start":
        assert not (folder / "last_checkpoint").exists()
    else:
        saved = (folder / "last_checkpoint").read_text()
        assert saved in (f"model_{done_steps:07d}.pth", "model_final.pth"), saved
        file = torch.load(folder / saved, weights_only=True)
        assert file["iteration"] == done_steps
    # Nothing is evaluated after a failed run. A rank that waits for results gets them.
    assert ("copypaste" in shown) == ((moment, kind, ranks) == ("results", "SIGTERM", 2))
    status, shown, _ = run_command(command, tmp_path / "resumed", "")
    assert status == 0, shown
    assert "copypaste" in shown
    assert all(torch.equal(final_weights(folder)[k], v) for k, v in expected.items())
