# Copyright (c) the d2_memfit developers.
"""A measurement of a card in parts: each goes on where the last one ended."""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import torch
import yaml

from ..common.checks import check_positive_number
from ..common.files import check_outputs, output_file
from ..errors import ConfigError
from .items import Item, Record, items_of
from .results import MACHINE, Results
from .tables import draw, markdown, summary
from .worker import run_worker

__all__ = ["measure_gpu"]

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

    What is expected is worked out first, on the CPU. Then the items are measured one by one, in a
    process that is started again if an error leaves nothing that works. Each record is on the disk
    at once, in ``measured.jsonl``. A later call with the same folder goes on after the last record.
    At the end, also after an error, it writes a table ``<card>.md``, a plot ``<card>.png`` and a
    device file ``<card>.yaml``. The line of JSON in ``<card>.json`` is to be sent.

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
    part = _Part(folder / "measured.jsonl", device, progress)
    try:
        if estimate is None and not part.has_all("expected", estimated):
            part.run("measured", items[:1], _SECONDS_OF_ANSWER)
        part.run("expected", estimated, _SECONDS_OF_ESTIMATES, estimate or "auto")
        if estimate is None:
            part.run("measured", items, 60 * minutes)
    finally:
        files = part.end()
    return files


class _Part:
    """A part of a measurement, which goes on after the records of earlier parts.

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
        self._answers = False
        self._begun: Optional[str] = None

    def has_all(self, stage: str, items: list[Item]) -> bool:
        return {item.key for item in items} <= self._results.stages[stage].keys()

    def run(self, stage: str, items: list[Item], seconds: float, model: str = "auto") -> None:
        """Run the items that have no record, until the time is over.

        Raises:
            ConfigError: the device does not answer.
        """
        done = self._results.stages[stage]
        end = time.monotonic() + seconds
        num_before = len(done)
        while not self.has_all(stage, items) or (stage == "measured" and not self._answers):
            left = end - time.monotonic()
            if left <= 0:
                return
            num_done = len(done)
            todo = [i.key for i in items if i.key not in done or i is items[0]]
            error = self._process([stage, self._device, model], todo, left)
            if stage == "measured" and not self._answers:
                if not self._path.stat().st_size:
                    self._path.unlink()
                raise ConfigError(f"--device {self._device} cannot be used: {error}")
            is_over = time.monotonic() >= end
            if self._begun is not None and (not is_over or len(done) == num_before):
                # The process died, or this item alone takes longer than a part.
                self._take({"stage": stage, "item": self._begun, "error": error})
            elif error is None or len(done) == num_done:
                return

    def _process(self, arguments: list[str], todo: list[str], seconds: float) -> Optional[str]:
        """Run a process until it ends or its time is over; return the error, if any."""
        self._begun = None
        expected = self._results.stages["expected"]
        given = {key: expected.get(key, {}).get("settings", {}) for key in todo}
        command = [sys.executable, "-m", "d2_memfit.measure.worker", *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if self._device == "cpu":  # freed memory goes back, so that a limit is of memory in use
            environment["MALLOC_MMAP_THRESHOLD_"] = str(2**17)
        return run_worker(command, environment, seconds, self._take, json.dumps(given))

    def _take(self, record: dict[str, Any]) -> None:
        """Write a record to the disk."""
        if "begin" in record:
            self._begun = record["begin"]
            return
        self._begun = None
        if record["item"] == MACHINE:
            self._answers = True
            machine = self._results.machine or record
            others = [machine[key] for key in ("card", "pytorch") if machine[key] != record[key]]
            if others:
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
        table, line, picture, device = outputs
        texts = {table: markdown(self._results), line: json.dumps(summary(self._results)) + "\n"}
        values = self._results.device_file()
        if values:
            values_text = yaml.safe_dump(values, sort_keys=False)
            texts[device] = f"# Measured by d2-memfit measure-gpu.\n{values_text}"
        for path, text in texts.items():
            with output_file(path, "w") as file:
                file.write(text)
        draw(self._results, picture)
        return [self._path, table, line, picture, *([device] if values else [])]

    def _outputs(self, machine: Record) -> list[Path]:
        """The table, line, picture and device file of a card, if it is known."""
        if not machine:
            return []
        name = re.sub("[^a-z0-9]+", "_", machine["card"].lower()).strip("_")
        return [self._path.with_name(name + ending) for ending in (".md", ".json", ".png", ".yaml")]
