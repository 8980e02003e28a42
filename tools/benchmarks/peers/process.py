# Copyright (c) the d2_memfit developers.
"""Running the worker to its end, or to a time limit, and finding out what it did."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from .worker import Spec

TOOLS = Path(__file__).resolve().parents[2]
ROOT = TOOLS.parent
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_RANK_WAS_KILLED = re.compile(r"^Root Cause.*?exitcode *: -9\b", re.M | re.S)  # torchrun's words


class Outcome(NamedTuple):
    """The outcome of a worker.

    Attributes:
        end: "finished", "died" or "hung".
        error: the last line of the error that ended it.
        passes: for each rank and each pass through the images, the images of each step.
        data_gb: memory of the process before training (of rank 0).
    """

    end: str
    error: str
    passes: list[Any]
    data_gb: float


def run_worker(spec: Spec, time_limit_s: float) -> Outcome:
    """Run one process for each rank of ``spec.sizes``. Children that exceed the limit are killed.

    Raises:
        RuntimeError: another process killed it, which says nothing about the side.
    """
    output_dir = Path(spec.output_dir)
    shutil.rmtree(output_dir, ignore_errors=True)
    output_dir.mkdir(parents=True)
    num_ranks = len(spec.sizes)
    command = [sys.executable, "-W", "ignore", "-m"]
    if num_ranks > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        command += ["-m"]
    command += ["benchmarks.peers.worker", json.dumps(spec._asdict())]
    path = os.pathsep.join([str(TOOLS), str(ROOT), os.environ.get("PYTHONPATH", "")])
    log_file = output_dir / "log.txt"
    with log_file.open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
        )
        try:
            end = "finished" if process.wait(time_limit_s) == 0 else "died"
        except subprocess.TimeoutExpired:
            end = "hung"
        finally:
            kill_with_children(process)
    log_text = log_file.read_text()
    if end == "died" and (
        -process.returncode in _FROM_OUTSIDE or _RANK_WAS_KILLED.search(log_text)
    ):
        raise RuntimeError(f"{spec.side} was killed from outside, see {log_file}: run it again")
    journals = [read_journal(output_dir / f"journal.{rank}.jsonl") for rank in range(num_ranks)]
    data_gb = journals[0][0]["data_gb"] if journals[0] else 0.0
    error = "" if end == "finished" else last_error(log_text)
    return Outcome(end, error, [passes_of(journal) for journal in journals], data_gb)


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children: torchrun starts its ranks in their own sessions."""
    if process.poll() is None:
        parent = psutil.Process(process.pid)
        for child in [*parent.children(recursive=True), parent]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()


def read_journal(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.open()] if path.exists() else []


def passes_of(journal: list[dict[str, Any]]) -> list[list[list[int]]]:
    passes: list[list[list[int]]] = []
    for line in journal:
        if line["event"] == "begin":
            passes.append([])
        elif line["event"] == "step":
            passes[-1].append(line["images"])
    return passes


def last_error(log: str) -> str:
    """The last line that looks like the message of an exception."""
    lines = re.findall(r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception)\w*: .*)$", log, re.M)
    own = [line for line in lines if "ChildFailedError" not in line]
    return own[-1][:200] if own else ""
