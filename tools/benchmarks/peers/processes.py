# Copyright (c) the d2_memfit developers.
"""Running a side in its own processes, to the end or to a time limit."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

TOOLS = Path(__file__).resolve().parents[2]
ERROR = re.compile(r"^(?:\[rank\d\]: ?)?(\w[\w.]*(?:Error|Exception)\w*: .*)$", re.M)


QUIET_S = 60  # a run whose processes compute less than a second in this time hangs


class Outcome(NamedTuple):
    """What a side did.

    Attributes:
        end: "finished", "died" or "hung".
        error: the last error in the log.
        restarts: how often the pass through the images started again.
        steps: images of each optimizer step since the last start, those of all ranks.
        extra_gb: peak of memory, in addition to that before training. Without a limit.
        trained_gb: memory of the trained parameters.
    """

    end: str
    error: str
    restarts: int
    steps: list[list[int]]
    extra_gb: float
    trained_gb: float


def race(side: str, sizes: list[Any], cut: tuple[int, int], extra_gb: Any = None) -> Outcome:
    """Train a side with one process for each rank.

    Args:
        sizes, extra_gb: see ``worker``.
        cut: images in a batch, and batches per step.

    Raises:
        RuntimeError: it did not finish although it had no limit.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = {"side": side, "sizes": sizes, "batch_size": cut[0], "steps": cut[1]}
        spec.update(extra_gb=extra_gb, folder=name)
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={len(sizes)}", "-m"]
        command = [sys.executable, "-W", "ignore", "-m", *(launcher if len(sizes) > 1 else [])]
        with (folder / "log.txt").open("w") as log:
            process = subprocess.Popen(
                [*command, "benchmarks.peers.worker", json.dumps(spec)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TOOLS), str(TOOLS.parent)])},
            )
            end = wait(process)
        log_text = (folder / "log.txt").read_text()
        if end != "finished" and extra_gb is None:
            raise RuntimeError(f"{side} {end} without a limit: {log_text[-3000:]}")
        errors = [e for e in ERROR.findall(log_text) if "ChildFailedError" not in e]
        restarts, steps = 0, []
        last: dict[str, float] = {}
        for file in folder.glob("journal.*"):
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            passes = [i for i, line in enumerate(lines) if line["event"] == "begin"] or [0]
            restarts = max(restarts, len(passes) - 1)
            steps += [x["images"] for x in lines[passes[-1] :] if x["event"] == "step"]
            last = lines[-1] if lines else {}
        error = errors[-1] if errors and end == "died" else ""
        memory = last.get("extra_gb", 0.0), last.get("trained_gb", 0.0)
        return Outcome(end, error, restarts, steps, *memory)


def wait(process: subprocess.Popen[bytes]) -> str:
    """The end of a process, which is killed with its children if it hangs."""
    parent = psutil.Process(process.pid)
    computed_s, since = 0.0, time.monotonic()
    while time.monotonic() < since + QUIET_S:
        try:
            return "finished" if process.wait(2) == 0 else "died"
        except subprocess.TimeoutExpired:
            family = [parent, *parent.children(recursive=True)]
            now_s = sum(sum(member.cpu_times()[:2]) for member in family)
            if abs(now_s - computed_s) > 1:
                computed_s, since = now_s, time.monotonic()
    for member in [*parent.children(recursive=True), parent]:
        member.kill()
    process.wait()
    return "hung"
