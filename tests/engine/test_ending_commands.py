# Copyright (c) the d2_memfit developers.
"""Commands that are ended at each moment, and go on to the weights of a run that nothing ends."""

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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="sums on a GPU are not always the same"),
]

LAST = 3  # iteration
TIME_LIMIT_S = 240  # a machine may be busy with other things
RANKS = ["--num-gpus", 2, "--dist-url", "auto"]
KEYS = {
    "SOLVER.ACCUMULATION_STEPS": 1,
    "SOLVER.MAX_ITER": LAST + 1,
    "SOLVER.CHECKPOINT_PERIOD": 2,
    "DATASETS.TRAIN": ("cli_train",),
    "DATASETS.TEST": ("cli_train",),
    "DATALOADER.NUM_WORKERS": 1,
    "MEMFIT.NORMALIZERS.POLICY": "window",
}

# Ends the run once, at a moment of one rank.
INJECTION = """
import multiprocessing, os, signal, time
from pathlib import Path

import torch
from detectron2.evaluation import COCOEvaluator
from detectron2.utils import comm
from d2_memfit.engine.defaults import MemfitMixin
from d2_memfit.engine.ending import SaveOnEnding
from d2_memfit.engine.train_loop import AccumulatingTrainer

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
at(AccumulatingTrainer, "_run", at_last("iteration"))
at(SaveOnEnding, "after_step", at_last("last hook"))
at(torch, "save", lambda state, *_: "save" if is_last(state) else "")
at(COCOEvaluator, "process", lambda *_: "evaluation")
at(COCOEvaluator, "evaluate", lambda *_: "results")
"""

# TorchScript optimises a function after its first call, so a resumed run would differ in a bit.
EAGER = """
from detectron2.modeling.meta_arch import retinanet
from fvcore.nn import sigmoid_focal_loss

retinanet.sigmoid_focal_loss_jit = sigmoid_focal_loss
"""

STATUSES = {"error": 1, "worker": 2, "SIGTERM": 143, "SIGINT": 130}
LINES = {
    "error": "error: ValueError: injected",
    "worker": "error: .*a worker was killed",
    "SIGTERM": "SIGTERM: end|error: rank 1 of this machine was ended with SIGTERM",
    "SIGINT": "SIGINT: end",
    "SIGKILL": "error: rank 1 of this machine was ended with SIGKILL",
}
# A worker's thread that hands files over, when the process that asks for one ends: alone, with its
# frames and its error. Any other traceback is found.
OF_PYTHON = re.compile(
    r"^(\[rank\d\]: )Traceback .*\n\1  File \".*/multiprocessing/resource_sharer\.py\".*\n"
    r"(\1 .*\n)*\1\w.*\n",
    re.MULTILINE,
)
OTHER_RANK = "error: the connection to another rank is lost|SIGTERM: end"
MOMENTS = ["start", "iteration", "last hook", "save", "evaluation", "results"]


def command_of(folder, coins, name, ranks, **keys):
    cfg = coins_cfg(folder / name, "retinanet", **{**KEYS, **keys})
    (folder / f"{name}.yaml").write_text(cfg.dump())
    options = ["--config-file", folder / f"{name}.yaml", "--resume"]
    data = ["--coco", "cli_train", coins / "train.json", coins / "train"]
    train_net = ROOT / "tools" / "train_net.py"
    return [train_net, *options, *data, *(RANKS if ranks > 1 else [])]


def start(command, printed, injection=""):
    code = EAGER + (INJECTION if injection else "") + FORKED_RANKS
    environment = {"INJECTION": injection, "OMP_NUM_THREADS": "1"}
    return Forked(["-c", code, *command], printed, env=environment)


def finish(job):
    """The status of a command, and the seconds since the epoch when it ended, with its workers."""
    try:
        status, ended = job.wait(TIME_LIMIT_S), time.time()
        while is_there(job.pid):
            assert time.time() < ended + TIME_LIMIT_S
            time.sleep(0.1)
        return status, ended
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def straight_runs(coins, tmp_path_factory):
    """Weights of runs that nothing ends."""

    @functools.cache
    def run(ranks, **keys):
        folder = tmp_path_factory.mktemp("straight")
        command = command_of(folder, coins, "run", ranks, **keys)
        status, _ = finish(start(command, folder / "printed"))
        assert status == 0, (folder / "printed").read_text()
        return final_weights(folder / "run")

    return run


def final_weights(folder):
    return torch.load(folder / "model_final.pth", weights_only=True)["model"]


def last_checkpoint(folder):
    """The checkpoint to resume from, and whether the states of all ranks are known in it."""
    file = folder / (folder / "last_checkpoint").read_text()
    checkpoint = torch.load(file, weights_only=True)
    return checkpoint, all(checkpoint["trainer"]["_trainer"]["run_state"]["ranks"])


@pytest.mark.parametrize(
    ("moment", "kind", "ranks"),
    [
        *itertools.product(MOMENTS, ["error", "SIGTERM", "SIGINT", "worker", "SIGKILL"], [1]),
        *itertools.product(MOMENTS, ["error", "SIGTERM", "worker", "SIGKILL"], [2]),
    ],
)
def test_a_command_ends_with_a_line_and_goes_on_to_the_same_weights(
    coins, straight_runs, tmp_path, moment, kind, ranks
):
    if (moment, kind) == ("start", "worker"):
        pytest.skip("there are no workers yet")
    expected, folder, done = straight_runs(ranks), tmp_path / "run", tmp_path / "done"
    rank = 0 if moment == "save" else ranks - 1  # which saves
    command = command_of(tmp_path, coins, "run", ranks)
    injection = f"{moment}:{kind}:{rank}:{LAST}:{done}"
    status, ended = finish(start(command, tmp_path / "printed", injection))
    shown = (tmp_path / "printed").read_text()
    is_killed = kind == "SIGKILL"
    assert status == (STATUSES[kind] if not is_killed else 137 if ranks > 1 else -9), shown
    said = OF_PYTHON.sub("", shown.partition("Exception ignored in")[0])
    assert "Traceback" not in said
    if not is_killed:
        lines = [line for line in shown.splitlines() if re.search("error: |SIG[A-Z]+: end", line)]
        assert [line for line in lines if re.search(LINES[kind], line)], shown
        assert all(re.search(f"{LINES[kind]}|{OTHER_RANK}", line) for line in lines), lines
    assert ended - float(done.read_text()) < 30, shown
    assert "copypaste" not in shown  # nothing is evaluated after a failed run
    if moment == "start":
        assert not (folder / "last_checkpoint").exists()
    else:
        steps = LAST - (moment == "iteration" and kind not in ("SIGTERM", "SIGINT"))
        if is_killed and rank == 0:  # the last periodic checkpoint is there
            steps = 1 if moment in ("iteration", "save") else LAST
        checkpoint, is_known = last_checkpoint(folder)
        assert checkpoint["iteration"] == steps
        # The first rank does not know the random states of one that has ended in an iteration.
        assert is_known == ((moment, ranks) != ("iteration", 2) or steps == LAST)
        if not is_known:
            expected = {}
    status, _ = finish(start(command, tmp_path / "resumed"))
    shown = (tmp_path / "resumed").read_text()
    assert status == 0, shown
    assert "copypaste" in shown
    assert all(torch.equal(final_weights(folder)[k], v) for k, v in expected.items())


LATE_RANK = """
import os, signal, time
import torch.distributed as dist
from d2_memfit.engine.launch import launch

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]

def main():
    dist.barrier()
    if attempt == 0:
        if rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

if rank == "1" and attempt > 0:
    time.sleep(1)
launch(main, 1)
"""


def test_a_restarted_rank_of_torchrun_does_not_look_for_a_dead_one(tmp_path):
    """It found the address of the last attempt when the other rank started later."""
    script, printed = tmp_path / "late_rank.py", tmp_path / "printed"
    script.write_text(LATE_RANK)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    assert finish(Forked([*torchrun, "--max-restarts", 1, script], printed))[0] == 0
    assert "Connection refused" not in printed.read_text()
