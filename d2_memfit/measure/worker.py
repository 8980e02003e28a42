# Copyright (c) the d2_memfit developers.
"""Processes that print records."""

import json
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Optional

import psutil

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
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  it is closed with the worker
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
        end = time.monotonic() + seconds
        timer = threading.Timer(seconds, self.end)
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
        if time.monotonic() >= end:
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


def started_ahead(
    starts: Iterable[Callable[[], Worker]], number: int
) -> Generator[Worker, None, None]:
    """Yield workers one by one, while the next ``number`` are started already.

    Those that still wait end with the generator: close it.
    """
    waiting: deque[Worker] = deque()
    try:
        for start in starts:
            waiting.append(start())
            if len(waiting) > number:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        for worker in waiting:
            worker.end()
