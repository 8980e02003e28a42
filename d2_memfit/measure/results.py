# Copyright (c) the d2_memfit developers.
"""The records of a card, expected and measured, with tables and a summary of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Optional

from tabulate import tabulate

from .items import Record
from .outside import constants_of

__all__ = ["MACHINE", "TITLES", "Results", "markdown", "ratio", "summary"]

MACHINE = "machine/"

_MACHINE = {
    "memory_mb": "{} MB",
    "pytorch": "PyTorch {}",
    "cuda": "CUDA {}",
    "cudnn": "cuDNN {}",
    "driver": "driver {}",
    "detectron2": "Detectron2 {}",
    "python": "Python {}",
    "date": "{}",
}
TITLES = {
    "zoo": "Configs of the zoo, float32, two images",
    "zoo amp": "Configs of the zoo, mixed precision, two images",
    "transformers": "Transformers, two images",
    "techniques x2": "Techniques, Mask R-CNN R50-FPN, two images",
    "techniques x8": "Techniques, Mask R-CNN R50-FPN, eight images",
    "plans": "Plans of Mask R-CNN R50-FPN under their caps",
    "presets": "Presets under their caps",
    "fragments": "Images of many sizes under a cap",
    "recovery": "Recovery from a batch that does not fit",
    "trainers": "Trainers, Mask R-CNN R50-FPN",
}
# Compared values and their titles. Ratios are expected over measured.
_COMPARED = {
    "allocated_gb": "allocated GB",
    "reserved_gb": "reserved GB",
    "device_gb": "of the device GB",
    "evaluation_allocated_gb": "evaluation GB",
    "seconds": "s",
}
_HIDDEN = ("stage", "item", "error", "settings", *_COMPARED)


class Results:
    """Records by stage, "expected" or "measured", and by item."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, Record]] = {"expected": {}, "measured": {}}

    @classmethod
    def read(cls, log: Path) -> "Results":
        """Read a file of records; other lines, such as one that was cut off, are left out."""
        results = cls()
        for line in log.read_text().splitlines():
            try:
                results.add(json.loads(line))
            except (ValueError, KeyError, TypeError):
                continue
        return results

    def add(self, record: Record) -> None:
        self.stages[record["stage"]][record["item"]] = record

    @property
    def machine(self) -> Record:
        """Card and software; empty before they are known."""
        return self.stages["measured"].get(MACHINE, {})

    @property
    def outside(self) -> list[Record]:
        """Rows about the memory outside the allocator, step by step."""
        rows: list[Record] = self.stages["measured"].get("outside/", {}).get("rows", [])
        return rows

    def device_file(self) -> Record:
        """Values of a device file: the calibration, with the constants that a new process measured.

        Only a new process can tell the context from kernels that are loaded later. The result is
        empty without a calibration.
        """
        record = self.stages["measured"].get("calibration/", {})
        if "flops_per_s" not in record:
            return {}
        values = {k: v for k, v in record.items() if k not in ("stage", "item")}
        return {**values, **constants_of(self.outside)} if values["is_gpu"] else values

    def of_group(self, group: str) -> list[tuple[str, Record, Record]]:
        """For each measured item of a group: its name, what was expected, and what was measured."""
        expected, measured = self.stages["expected"], self.stages["measured"]
        keys = [key for key in measured if key.partition("/")[0] == group]
        return [(key.partition("/")[2], expected.get(key, {}), measured[key]) for key in keys]


def ratio(expected: Record, measured: Record, value: str) -> Optional[float]:
    """An expected value over the measured one; None if one of them is missing."""
    above, below = expected.get(value), measured.get(value)
    return above / below if above and below else None


def markdown(results: Results) -> str:
    """Make tables of the results; failed measurements give their reason."""
    machine = results.machine
    lines = [f"## {machine['card']}", ""]
    if machine["rehearsal"]:
        lines += ["A rehearsal on a CPU. These are not figures of a card.", ""]
    stated = [text.format(machine[key]) for key, text in _MACHINE.items() if machine.get(key)]
    lines += [f"{', '.join(stated)}.", ""]
    tables = {title: _of_group(results, group) for group, title in TITLES.items()}
    tables["Outside the allocator"] = results.outside
    for title, rows in tables.items():
        if rows:
            lines += [f"### {title}", "", _table(rows), ""]
    return "\n".join(lines)


def summary(results: Results) -> Record:
    """The results of a card, as one line of JSON that can be sent.

    Each comparison has the median of expected over measured, and the two ends.
    """
    compared: dict[str, Any] = {}
    for group in TITLES:
        for value in _COMPARED:
            ratios = [ratio(e, m, value) for _, e, m in results.of_group(group)]
            known = [r for r in ratios if r is not None]
            if known:
                ends = (median(known), min(known), max(known))
                compared.setdefault(group, {})[value] = [round(r, 3) for r in ends]
    measured = results.stages["measured"].items()
    errors = {key: record["error"][:80] for key, record in measured if "error" in record}
    values = results.device_file()
    speeds = ("flops_per_s", "bytes_per_s", "host_bytes_per_s")
    return {
        "machine": {k: v for k, v in results.machine.items() if k not in ("stage", "item")},
        "constants": constants_of(results.outside),
        "speeds": {name: values[name] for name in speeds if name in values},
        "expected_over_measured": compared,
        "errors": errors,
    }


def _of_group(results: Results, group: str) -> list[Record]:
    rows = []
    for name, expected, measured in results.of_group(group):
        row = {group: name, **{k: v for k, v in measured.items() if k not in _HIDDEN}}
        for value, title in _COMPARED.items():
            row[f"{title}, expected"] = expected.get(value)
            row[title] = measured.get(value)
            times = ratio(expected, measured, value)
            row[f"{title}, x"] = None if times is None else f"{times:.2f}"
        row["steps"] = expected.get("steps")
        row["error"] = measured.get("error") or expected.get("error")
        rows.append(row)
    return rows


def _table(rows: Sequence[Record]) -> str:
    """A table of rows: a column for each key that has a value, errors in the last one."""
    keys = dict.fromkeys(key for row in rows for key in row if key != "error")
    columns = {key.replace("_", " "): [_text(row.get(key)) for row in rows] for key in keys}
    columns[""] = [_text(row.get("error")) for row in rows]
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    return str(tabulate(kept, headers="keys", tablefmt="pipe", disable_numparse=True))


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
