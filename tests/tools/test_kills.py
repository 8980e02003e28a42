# Copyright (c) the d2_memfit developers.
"""Processes that are killed, and a run that ends as if they had not been."""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time

import psutil
import pytest
import torch
from forks import FORKED_RANKS, Forked
from resumed import coins_cfg, is_there
from tiny import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="sums on a GPU are not always the same"),
]

TIME_LIMIT_S = 240
TRAIN_NET = ROOT / "tools" / "train_net.py"


def command(coins, tmp_path, name, ranks, **keys):
    """tools/train_net.py as torchrun starts it again, or as its user does."""
    cfg = coins_cfg(tmp_path / name, "faster_rcnn", **keys)
    cfg.SOLVER.IMS_PER_BATCH = 2 * ranks
    cfg.SOLVER.CHECKPOINT_PERIOD = 3
    cfg.SEED = 1
    config_file = tmp_path / f"{name}.yaml"
    config_file.write_text(cfg.dump())
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    return [
        *([*torchrun, "--max-restarts", 3] if ranks > 1 else []),
        *(TRAIN_NET, "--config-file", config_file, "--resume"),
        *("--coco", "coins_train", coins / "train.json", coins / "train"),
    ]


def start(command, log):
    return Forked(command, log, env={"OMP_NUM_THREADS": "1"})


def wait_for(condition, process, log):
    end = time.monotonic() + TIME_LIMIT_S
    while not condition():
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < end, log.read_text()[-4000:]
        time.sleep(0.05)


def wait_for_checkpoint(name, folder, process, log):
    last = folder / "last_checkpoint"
    wait_for(lambda: last.exists() and last.read_text() >= name, process, log)


def finish(process, log):
    assert process.wait(TIME_LIMIT_S) == 0, log.read_text()[-4000:]


def final_weights(folder):
    return torch.load(folder / "model_final.pth", weights_only=True)["model"]


KILLED_IN_ITERATION_7 = """
import os, runpy, signal, sys
from d2_memfit.engine import AccumulatingTrainer

def run_step(self, run_step=AccumulatingTrainer.run_step):
    if self.iter == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    run_step(self)

AccumulatingTrainer.run_step = run_step
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def ranks_of(torchrun):
    """The processes that torchrun started."""
    children = psutil.Process(torchrun.pid).children()
    return [child for child in children if "train_net.py" in " ".join(child.cmdline())]


EVALUATED = {
    "DATASETS.TEST": ("coins_train",),
    "TEST.EVAL_PERIOD": 3,  # after the checkpoint of the same iteration
}


def wait_for_end(process):
    """Wait for the processes that it has started."""
    end = time.monotonic() + TIME_LIMIT_S
    while is_there(process.pid):
        assert time.monotonic() < end
        time.sleep(0.05)


def check_same(tmp_path):
    expected, actual = (final_weights(tmp_path / name) for name in ("straight", "resumed"))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


@pytest.mark.long
@pytest.mark.parametrize(
    "keys",
    [
        {"DATALOADER.NUM_WORKERS": 2, **EVALUATED},
        pytest.param({"SOLVER.AMP.ENABLED": True}, marks=pytest.mark.exhaustive),
    ],
    ids=["float32", "float16"],
)
def test_a_run_that_was_killed_ends_with_the_same_weights(coins, tmp_path, keys):
    log = tmp_path / "log"
    finish(start(command(coins, tmp_path, "straight", 1, **keys), log), log)
    resumed = command(coins, tmp_path, "resumed", 1, **keys)
    process = start(["-c", KILLED_IN_ITERATION_7, *resumed], log)
    assert process.wait(TIME_LIMIT_S) == -signal.SIGKILL, log.read_text()[-4000:]
    wait_for_end(process)  # of its workers
    assert (tmp_path / "resumed" / "last_checkpoint").read_text() == "model_0000005.pth"
    finish(start(resumed, log), log)
    assert "The data continue where they were" in log.read_text()
    check_same(tmp_path)


@pytest.mark.long
def test_two_ranks_that_were_killed_end_with_the_same_weights(coins, tmp_path):
    log, script = tmp_path / "log", tmp_path / "killed.py"
    script.write_text(KILLED_IN_ITERATION_7)

    def two_ranks_of(name):
        _, *options = command(coins, tmp_path, name, 1, **EVALUATED)
        keys = ["SOLVER.IMS_PER_BATCH", 4]
        return [TRAIN_NET, *options, "--num-gpus", 2, "--dist-url", "auto", *keys]

    finish(start_with_forked_ranks(two_ranks_of("straight"), log), log)
    process = start_with_forked_ranks([script, *two_ranks_of("resumed")], log)
    assert process.wait(TIME_LIMIT_S) == 128 + signal.SIGKILL, log.read_text()[-4000:]
    wait_for_end(process)
    assert (tmp_path / "resumed" / "last_checkpoint").read_text() == "model_0000005.pth"
    finish(start_with_forked_ranks(two_ranks_of("resumed"), log), log)
    check_same(tmp_path)


LATE_RANK = """
import os, signal, time
import torch.distributed as dist
from d2_memfit.engine import launch

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


@pytest.mark.long
def test_a_restarted_rank_does_not_look_for_a_dead_one(tmp_path):
    """It found the address of the last attempt when the other rank started later."""
    script, log = tmp_path / "late_rank.py", tmp_path / "log"
    script.write_text(LATE_RANK)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    finish(start([*torchrun, "--max-restarts", 1, script], log), log)
    assert "Connection refused" not in log.read_text()


@pytest.mark.exhaustive
def test_torchrun_restarts_killed_ranks_and_the_run_ends_with_the_same_weights(coins, tmp_path):
    log = tmp_path / "log"
    finish(start(command(coins, tmp_path, "straight", 2), log), log)
    torchrun = start(command(coins, tmp_path, "elastic", 2), log)
    for checkpoint, victim in (("model_0000002.pth", 1), ("model_0000005.pth", 0)):
        wait_for_checkpoint(checkpoint, tmp_path / "elastic", torchrun, log)
        ranks_of(torchrun)[victim].kill()
    finish(torchrun, log)
    assert log.read_text().count("The data continue where they were") >= 2
    expected, actual = (final_weights(tmp_path / name) for name in ("straight", "elastic"))
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def start_with_forked_ranks(command, log):
    """The same, with ranks that import nothing: an ending takes a third of the time."""
    return Forked(["-c", FORKED_RANKS, *command], log, env={"OMP_NUM_THREADS": "1"})


ENDINGS = {signal.SIGKILL: 3, signal.SIGTERM: 2, signal.SIGINT: 1, signal.SIGHUP: 1}  # and weights
TARGETS = ("job", "all", "rank 0", "rank 1")
LATE = r"iter: 1[45] |Start inference on"  # of 16 iterations; the evaluation after them, too


def end_at_random(job, printed, is_late, rng):
    """End a job, or one of its ranks, at a moment after training starts; return how."""
    seen = LATE if is_late else "Starting training" if rng.random() < 0.9 else ""
    while not re.search(seen, printed.read_text()) and job.poll() is None:
        time.sleep(0.02)
    time.sleep(rng.uniform(0, 1.5 if is_late else 5))
    number = rng.choices(list(ENDINGS), ENDINGS.values())[0]
    target = rng.choice(TARGETS)
    was_running = job.poll() is None
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, IndexError):
        children = psutil.Process(job.pid).children()
        ranks = [c for c in children if "resource_tracker" not in " ".join(c.cmdline())]
        if target == "all":
            os.killpg(job.pid, number)
        else:
            process = job.pid if target == "job" else ranks[int(target[-1])].pid
            os.kill(process, number)
    sent = time.monotonic()
    try:
        status = job.wait(TIME_LIMIT_S)
        while is_there(job.pid):
            assert time.monotonic() < sent + TIME_LIMIT_S, f"{number} to {target} leaves processes"
            time.sleep(0.1)
    except subprocess.TimeoutExpired as e:
        text = printed.read_text()[-4000:]
        raise AssertionError(f"{number} to {target} ends nothing: {text}") from e
    if not was_running:
        return ""
    seconds = time.monotonic() - sent
    return f"{signal.Signals(number).name} to {target}: {status} in {seconds:.1f} s"


@pytest.mark.exhaustive
def test_whole_runs_on_two_ranks_that_end_at_random_moments_have_the_same_weights(coins, tmp_path):
    """Six endings, or as many as ENDINGS says.

    Half of them are of resumed runs. A third are of runs with evaluations, and a third in the last
    two iterations or the evaluation after them.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a job ignores it where this does, as in nohup
    rng, printed = random.Random(int(os.environ.get("SEED", "0"))), tmp_path / "printed"
    keys = {"SOLVER.MAX_ITER": 16, "DATALOADER.NUM_WORKERS": 1, "DATASETS.TEST": ("coins_train",)}
    kinds = [keys, keys, {**EVALUATED, **keys}]

    def start_run(name, kind):
        full = command(coins, tmp_path, name, 1, **kinds[kind])
        file = tmp_path / f"{name}.yaml"
        text = file.read_text().replace("IMS_PER_BATCH: 2", "IMS_PER_BATCH: 4")
        file.write_text(text.replace("CHECKPOINT_PERIOD: 3", "CHECKPOINT_PERIOD: 6"))
        full += ["--num-gpus", 2, "--dist-url", "auto"]
        printed.write_text("")
        return (start if rng.random() < 0.1 else start_with_forked_ranks)(full, printed)

    for kind in (0, 2):
        finish(start_run(f"straight{kind}", kind), printed)
    done = []
    while len(done) < int(os.environ.get("ENDINGS", "6")):
        kind, name = len(done) // 2 % 3, f"run{len(done)}"
        for is_late in (len(done) % 3 == 0, len(done) % 3 == 1):
            ending = end_at_random(start_run(name, kind), printed, is_late, rng)
            done += [ending] if ending else []
            print(len(done), kind, "late" if is_late else "", ending, flush=True)
        finish(start_run(name, kind), printed)
        folders = (tmp_path / n for n in (f"straight{kind // 2 * 2}", name))
        expected, actual = map(final_weights, folders)
        assert all(torch.equal(actual[key], expected[key]) for key in expected), done
        shutil.rmtree(tmp_path / name)
