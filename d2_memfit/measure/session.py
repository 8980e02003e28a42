# Copyright (c) the d2_memfit developers.
"""A measurement of a card in parts: each goes on where the last one ended."""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, Optional

import torch
import yaml

from ..common.checks import check_positive_number
from ..common.files import check_outputs, output_file
from ..errors import ConfigError
from .items import Item, Record, items_of
from .results import MACHINE, Results, markdown, summary
from .worker import Worker, started_ahead

__all__ = ["measure_gpu"]

_AHEAD = 2  # processes that import everything while another measures
_SECONDS_OF_ANSWER = 600.0
_SECONDS_OF_ESTIMATES = 3600.0


def measure_gpu(
    device: str,
    minutes: float,
    folder: Path,
    progress: Callable[[str], None] = print,
    estimate: Optional[str] = None,
) -> list[Path]:
    """Measure a device, and compare it with estimates.

    What is expected is worked out first, on the CPU. Then the items are measured one by one, each
    in a new process: what a process takes outside the allocator only grows. Each record is on the
    disk at once, in ``measured.jsonl``. A later call with the same folder goes on after the last
    record.
    At the end, also after an error, it writes tables ``<card>.md`` and a device file
    ``<card>.yaml``. The line of JSON in ``<card>.json`` is to be sent.

    Args:
        device: such as "cuda:0"; "cpu" is a small rehearsal.
        minutes: time limit of the measurements in this call.
        folder: for the files.
        progress: called with a line for each record.
        estimate: a device file; then only the estimates are made, for its card.

    Returns:
        list[Path]: the files.

    Raises:
        ConfigError: the device does not answer, or the folder has figures of another one.
    """
    device = "cuda:0" if device == "cuda" else device
    if device != "cpu" and not re.fullmatch(r"cuda:\d+", device):
        raise ConfigError(f"--device must be cuda:0, of another number, or cpu, got {device!r}")
    check_positive_number("--minutes", minutes)
    items = items_of(torch.device(device))
    estimated = [item for item in items if item.has_estimate]
    session = _Session(folder / "measured.jsonl", device, progress)
    try:
        if estimate is None and not session.has_all("expected", estimated):
            session.run("measured", items[:1], _SECONDS_OF_ANSWER)
        session.run("expected", estimated, _SECONDS_OF_ESTIMATES, estimate or "auto")
        if estimate is None:
            session.run("measured", items, 60 * minutes)
    finally:
        files = session.end()
    return files


class _Session:
    """One of several calls of a measurement, which goes on after the records of earlier parts.

    Args:
        log: file of all records, a line each.
    """

    def __init__(self, log: Path, device: str, progress: Callable[[str], None]) -> None:
        self._device = device
        self._progress = progress
        self._start = time.monotonic()
        self._path = log
        check_outputs(
            [log], (), lambda _: any(Results.read(log).stages.values()) or not log.stat().st_size
        )
        self._results = Results.read(log) if log.exists() else Results()
        check_outputs(self._outputs(self._results.machine))
        log.parent.mkdir(parents=True, exist_ok=True)
        self._file = log.open("a")
        if log.stat().st_size and not log.read_text().endswith("\n"):
            self._file.write("\n")  # the last line was cut off

    def has_all(self, stage: str, items: list[Item]) -> bool:
        return {item.key for item in items} <= self._results.stages[stage].keys()

    def run(self, stage: str, items: list[Item], seconds: float, model: str = "auto") -> None:
        """Run the items that have no record, and that of the machine, until the time is over.

        Raises:
            ConfigError: the device does not answer.
        """
        done, expected = self._results.stages[stage], self._results.stages["expected"]
        left = [i.key for i in items if i.key not in done or i.key == MACHINE]
        is_measured = stage == "measured"
        worker = ("-m", "d2_memfit.measure.jobs", stage, self._device, model)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        start = partial(Worker, [sys.executable, *worker], environment)
        starts = repeat(start, len(left)) if is_measured else repeat(start)
        end = time.monotonic() + seconds
        num_before = len(done)
        with closing(started_ahead(starts, _AHEAD if is_measured else 0)) as workers:
            while left:
                keys = left[:1] if is_measured else left
                given = {key: expected.get(key, {}).get("settings", {}) for key in keys}
                left_s = max(end - time.monotonic(), 0)
                error = next(workers).run(json.dumps(given), left_s, self._take)
                lost = next((key for key in keys if key not in done), None)
                if MACHINE in keys and error is not None:
                    if not self._path.stat().st_size:
                        self._path.unlink()
                    raise ConfigError(f"--device {self._device} cannot be used: {error}")
                if lost is not None:
                    if time.monotonic() >= end and len(done) > num_before:
                        return
                    # The process died, or this item alone takes longer than a part.
                    self._take({"stage": stage, "item": lost, "error": error or "no record"})
                left = [key for key in left if key not in done]

    def _take(self, record: dict[str, Any]) -> None:
        """Write a record to the disk."""
        if record["item"] == MACHINE:
            machine = self._results.machine or record
            if any(machine[key] != record[key] for key in ("card", "pytorch")):
                raise ConfigError(
                    f"{self._path} has figures of {machine['card']} with PyTorch "
                    f"{machine['pytorch']}; name another --output"
                )
            if self._results.machine:
                return
            check_outputs(self._outputs(record))
        self._results.add(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        hidden = ("stage", "item", "settings", "rows", "date")
        values = [value for key, value in record.items() if key not in hidden]
        short = ", ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in values)[:150]
        seconds = time.monotonic() - self._start
        self._progress(f"{seconds:4.0f} s  {record['stage']} {record['item']}: {short}")

    def end(self) -> list[Path]:
        """Write what there is so far, and return the files."""
        self._file.close()
        outputs = self._outputs(self._results.machine)
        if not outputs:
            return [self._path]
        table, line, device = outputs
        texts = {table: markdown(self._results), line: json.dumps(summary(self._results)) + "\n"}
        values = self._results.device_file()
        if values:
            values_text = yaml.safe_dump(values, sort_keys=False)
            texts[device] = f"# Measured by d2-memfit measure-gpu.\n{values_text}"
        for path, text in texts.items():
            with output_file(path, "w") as file:
                file.write(text)
        return [self._path, table, line, *([device] if values else [])]

    def _outputs(self, machine: Record) -> list[Path]:
        """The table, line and device file of a card, if it is known."""
        if not machine:
            return []
        name = re.sub("[^a-z0-9]+", "_", machine["card"].lower()).strip("_")
        return [self._path.with_name(name + ending) for ending in (".md", ".json", ".yaml")]
