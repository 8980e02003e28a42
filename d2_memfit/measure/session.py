# Copyright (c) the d2_memfit developers.
"""All measurements in one run. Each record is written at once, so the run can be interrupted."""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Optional

import yaml

from ..common.checks import check_positive_number
from ..common.files import whole_file
from ..errors import ConfigError
from .jobs import JOBS
from .outside import constants_of
from .tables import draw, markdown
from .worker import run_worker

__all__ = ["device_file", "measure_gpu"]

_LEAST_SECONDS = 5.0  # time that must be left to start a job


def measure_gpu(
    device: str, minutes: float, folder: Path, progress: Callable[[str], None] = print
) -> Path:
    """Measure a device, each measurement in its own process.

    Writes ``<card>.json`` after each record. At the end it also writes a device file
    ``<card>.yaml``, a table ``<card>.md`` and a plot ``<card>.png``.

    Args:
        device: such as "cuda:0"; "cpu" is a small rehearsal.
        minutes: time limit in minutes; measurements left over are skipped.
        folder: for the files.
        progress: called with a line for each record.

    Returns:
        Path: of the JSON file.

    Raises:
        ConfigError: the device does not answer.
    """
    device = "cuda:0" if device == "cuda" else device
    if device != "cpu" and not re.fullmatch(r"cuda:\d+", device):
        raise ConfigError(f"--device must be cuda:0, of another number, or cpu, got {device!r}")
    check_positive_number("--minutes", minutes)
    folder.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    results = _Results(folder, minutes, progress)
    for job in JOBS:
        left = start + 60 * minutes - time.monotonic()
        error: Optional[str] = "there was no time left"
        if left > _LEAST_SECONDS:
            # A measurement that hangs leaves time for the others.
            share = left if job == [*JOBS][-1] else max(left / 2, _LEAST_SECONDS)
            error = _run(job, device, share, partial(results.take, job))
        if error is not None:
            results.all["errors"][job] = error
        if job == "machine" and not results.all.get(job):
            raise ConfigError(f"--device {device} cannot be used: {error}")
    results.write()
    path = results.path
    values = device_file(results.all)
    if values:
        text = yaml.safe_dump(values, sort_keys=False)
        path.with_suffix(".yaml").write_text(f"# Measured by d2-memfit measure-gpu.\n{text}")
    path.with_suffix(".md").write_text(markdown(results.all))
    draw(results.all, path.with_suffix(".png"))
    return path


def device_file(results: dict[str, Any]) -> dict[str, Any]:
    """Values of a device file: the calibration, with the constants that a new process measured.

    Only a new process can tell the context from kernels that are loaded later. The result is empty
    without a calibration.
    """
    values = {k: v for record in results.get("calibration", []) for k, v in record.items()}
    is_of_a_gpu = bool(values) and values["is_gpu"]
    return {**values, **constants_of(results.get("outside", []))} if is_of_a_gpu else values


class _Results:
    """The results so far, written to a file once the card's name is known."""

    def __init__(self, folder: Path, minutes: float, progress: Callable[[str], None]) -> None:
        self.all: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "minutes": minutes}
        self.all["errors"] = {}
        self._folder = folder
        self._progress = progress
        self._start = time.monotonic()

    @property
    def path(self) -> Path:
        card = self.all["machine"][0]["card"].lower()
        return self._folder / f"{re.sub('[^a-z0-9]+', '_', card).strip('_')}.json"

    def take(self, job: str, record: dict[str, Any]) -> None:
        self.all.setdefault(job, []).append(record)
        self.write()
        self._progress(f"{time.monotonic() - self._start:4.0f} s  {job}: {_short(record)}")

    def write(self) -> None:
        """Write the file as a whole."""
        with whole_file(self.path, "w") as file:
            file.write(json.dumps(self.all, indent=1))


def _run(
    job: str, device: str, seconds: float, take: Callable[[dict[str, Any]], None]
) -> Optional[str]:
    """Run a job until it ends or its time is over; return the error, if any."""
    command = [sys.executable, "-m", "d2_memfit.measure.worker", job, device]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if device == "cpu":  # freed memory goes back, so that a limit applies to memory in use
        environment["MALLOC_MMAP_THRESHOLD_"] = str(2**17)
    return run_worker(command, environment, seconds, take)


def _short(record: dict[str, Any]) -> str:
    parts = [f"{v:.3g}" if isinstance(v, float) else str(v) for v in record.values()]
    return ", ".join(parts)[:150]
