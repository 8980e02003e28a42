# Copyright (c) the d2_memfit developers.
"""Processes that print records, and the one that measures items.

``python -m d2_memfit.measure.worker STAGE DEVICE MODEL`` imports everything, then reads JSON from
its input: the keys of items, each with the settings of its plan. It prints each record at once, as
one line.
"""

import json
import logging
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Optional

import psutil

from ..common.library_warnings import ignore_warnings_of_libraries

__all__ = ["Worker", "say", "started_ahead"]

_MARK = "d2_memfit record: "  # other lines come from libraries


def say(record: Mapping[str, Any]) -> None:
    """Print a record for the process that called :meth:`Worker.run`."""
    print(_MARK + json.dumps(record), flush=True)


class Worker:
    """A process that prints records. It can import everything before it is asked to run.

    Args:
        command, environment: of the process.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by end()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )

    def run(
        self, given: str, seconds: float, take: Callable[[dict[str, Any]], None]
    ) -> Optional[str]:
        """Let the process run until it ends or its time is over, and take each record it says.

        Args:
            given: the line that it reads from its input.

        Returns:
            Optional[str]: the error, if any.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        is_over = threading.Event()

        def end() -> None:
            is_over.set()
            self.end()

        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            with suppress(BrokenPipeError), self._process.stdin as file:  # it may have died
                file.write(given)
            for line in self._process.stdout:
                if line.startswith(_MARK):
                    take(json.loads(line[len(_MARK) :]))
        finally:
            timer.cancel()
            self.end()
        if is_over.is_set():
            return "the time was over"
        self._errors.seek(0)
        last = [line.strip() for line in self._errors if line.strip()][-1:]
        status = self._process.returncode
        return f"status {status}: {''.join(last)[:500]}" if status else None

    def end(self) -> None:
        """End the process, and those that it has started."""
        if self._process.returncode is None:  # its number is not another's yet
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(self._process.pid)
                for each in (*process.children(recursive=True), process):
                    each.kill()
            self._process.wait()


@contextmanager
def started_ahead(
    starts: Iterable[Callable[[], Worker]], number: int
) -> Iterator[Iterator[Worker]]:
    """Yield workers one by one, while the next ``number`` are started already."""
    waiting: deque[Worker] = deque()

    def workers() -> Iterator[Worker]:
        for start in starts:
            waiting.append(start())
            if len(waiting) > number:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()

    try:
        yield workers()
    finally:
        for worker in waiting:
            worker.end()


def main(stage: str, device_name: str, model_name: str) -> None:
    ignore_warnings_of_libraries()
    import torch

    from ..memory import use_expandable_segments
    from ..planner.device import DeviceModel
    from .items import ITEMS, Scale, expected
    from .jobs import error_record, measure
    from .results import MACHINE

    logging.getLogger("d2_memfit").setLevel(logging.ERROR)  # out-of-memory errors are intended
    use_expandable_segments()  # as in training under a budget
    items = {item.key: item for item in ITEMS}
    given = json.loads(sys.stdin.read() or "{}")  # nothing, if it is not needed
    # A process that waits has no CUDA context, whose memory would be measured with an item's.
    device = torch.device(device_name)
    if device.type == "cuda" and stage == "measured":
        torch.cuda.set_device(device)
    scale = Scale.of(device)
    model = DeviceModel.choose(model_name, device_name) if stage == "expected" else None
    for key, settings in given.items():
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


if __name__ == "__main__":
    main(*sys.argv[1:])
