# Copyright (c) the d2_memfit developers.
"""Processes that print records, and the one that makes a measurement.

``python -m d2_memfit.measure.worker JOB DEVICE`` prints each record as one line at once. A CUDA
error ends only this process.
"""

import json
import logging
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from ..common.library_warnings import ignore_warnings_of_libraries

__all__ = ["run_worker", "say"]

_MARK = "d2_memfit record: "  # other lines come from libraries


def say(record: Mapping[str, Any]) -> None:
    """Print a record for the process that called :func:`run_worker`."""
    print(_MARK + json.dumps(record), flush=True)


def run_worker(
    command: Sequence[str],
    environment: Mapping[str, str],
    seconds: float,
    take: Callable[[dict[str, Any]], None],
) -> Optional[str]:
    """Run a process until it ends or its time is over, and take each record that it says.

    Returns:
        Optional[str]: the error, if any.
    """
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        is_over = threading.Event()

        def end() -> None:
            is_over.set()
            process.kill()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(_MARK):
                    take(json.loads(line[len(_MARK) :]))
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        if is_over.is_set():
            return "the time was over"
        errors.seek(0)
        last = [line.strip() for line in errors.read().splitlines() if line.strip()][-1:]
        return f"status {process.returncode}: {''.join(last)[:500]}" if process.returncode else None


def main(job: str, device_name: str) -> None:
    ignore_warnings_of_libraries()
    import torch

    from ..memory import use_expandable_segments
    from .jobs import JOBS
    from .scale import Scale

    logging.getLogger("d2_memfit").setLevel(logging.ERROR)  # out-of-memory errors are intended
    use_expandable_segments()  # as in training under a budget
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for record in JOBS[job](device, Scale.of(device)):
        say(record)


if __name__ == "__main__":
    main(*sys.argv[1:])
