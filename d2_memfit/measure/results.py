# Copyright (c) the d2_memfit developers.
"""The records of a card: expected and measured values."""

import json
from pathlib import Path
from typing import Optional

from .items import Record
from .outside import constants_of

__all__ = ["MACHINE", "Results"]

MACHINE = "machine/"


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

    def pairs(self) -> list[tuple[str, Record, Record]]:
        """For each measured item of a job: its key, what was expected, and what was measured."""
        expected = self.stages["expected"]
        return [
            (key, expected.get(key, {}), record)
            for key, record in self.stages["measured"].items()
            if not key.endswith("/") or "images" in record or "error" in record
        ]

    def ratio(self, key: str, value: str) -> Optional[float]:
        """An expected value over the measured one; None if one of them is missing."""
        expected = self.stages["expected"].get(key, {}).get(value)
        measured = self.stages["measured"].get(key, {}).get(value)
        return expected / measured if expected and measured else None
