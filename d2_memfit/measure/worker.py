# Copyright (c) the d2_memfit developers.
"""Processes that print records, and the one that measures items.

``python -m d2_memfit.measure.worker STAGE DEVICE MODEL`` reads JSON from its input: the keys of
items, each with the settings of its plan. It prints each record as one line at once.
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

__all__ = ["STICKY_ERROR", "run_worker", "say"]

STICKY_ERROR = 9  # exit status: nothing works on the device any more, a new process is needed

_MARK = "d2_memfit record: "  # other lines come from libraries


def say(record: Mapping[str, Any]) -> None:
    """Print a record for the process that called :func:`run_worker`."""
    print(_MARK + json.dumps(record), flush=True)


def run_worker(
    command: Sequence[str],
    environment: Mapping[str, str],
    seconds: float,
    take: Callable[[dict[str, Any]], None],
    given: str = "",
) -> Optional[str]:
    """Run a process until it ends or its time is over, and take each record that it says.

    Args:
        given: what it can read from its input.

    Returns:
        Optional[str]: the error, if any.
    """
    with (
        tempfile.TemporaryFile("w+") as input_file,
        tempfile.TemporaryFile("w+") as errors,
    ):
        input_file.write(given)
        input_file.seek(0)
        with subprocess.Popen(
            command,
            stdin=input_file,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process:
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


def main(stage: str, device_name: str, model_name: str) -> None:
    ignore_warnings_of_libraries()
    import torch

    from ..memory import use_expandable_segments
    from ..planner.device import DeviceModel
    from .items import ITEMS, Scale, expected
    from .jobs import error_record, measure, still_works
    from .results import MACHINE

    logging.getLogger("d2_memfit").setLevel(logging.ERROR)  # out-of-memory errors are intended
    use_expandable_segments()  # as in training under a budget
    device = torch.device(device_name)
    if device.type == "cuda" and stage == "measured":
        torch.cuda.set_device(device)
    scale = Scale.of(device)
    model = DeviceModel.choose(model_name, device_name) if stage == "expected" else None
    items = {item.key: item for item in ITEMS}
    for key, settings in json.load(sys.stdin).items():
        say({"begin": key})
        try:
            if model is not None:
                record = expected(items[key], device, model, scale)
            else:
                record = measure(items[key], settings, device, scale)
        except Exception as e:
            if key == MACHINE:
                raise
            record = error_record(e)
        say({"stage": stage, "item": key, **record})
        if stage == "measured" and not still_works(device):
            sys.exit(STICKY_ERROR)


if __name__ == "__main__":
    main(*sys.argv[1:])
