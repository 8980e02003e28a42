# Copyright (c) the d2_memfit developers.
"""Reader for a run's records of its memory."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ..errors import DataError

__all__ = ["Run", "read_run"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """The memory of a run, over its iterations."""

    metrics: list[dict[str, Any]]  # lines of metrics.json with reports of the monitor
    events: list[dict[str, Any]]  # out-of-memory errors, lines of memfit_oom.jsonl
    owners: dict[str, int]  # bytes at the peak of one iteration, by owner; empty if unknown
    owners_iteration: Optional[int]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Iterations and values of a scalar, named without the prefix "memfit/"."""
        key = f"memfit/{name}"
        lines = [line for line in self.metrics if key in line]
        return [line["iteration"] for line in lines], [line[key] for line in lines]

    @property
    def budget_gb(self) -> Optional[float]:
        for line in self.metrics:
            if line.get("memfit/budget_used"):
                return line["memfit/reserved_peak_gb"] / line["memfit/budget_used"]
        return None


def read_run(output_dir: str) -> Run:
    """Read metrics.json, memfit_oom.jsonl and the last memfit_memory_*.json of an OUTPUT_DIR.

    Raises:
        DataError: there is nothing about memory, or a file cannot be read.
    """
    folder = Path(output_dir)
    if not folder.is_dir():
        raise DataError(f"{output_dir} is not a folder. Name the OUTPUT_DIR of a run")
    metrics = _read_lines(folder / "metrics.json")
    events = _read_lines(folder / "memfit_oom.jsonl")
    reports = [line for line in metrics if "memfit/allocated_gb" in line]
    if not reports and not events:
        raise DataError(
            f"{output_dir} has no reports of memory: metrics.json "
            + ("has no memfit/allocated_gb" if metrics else "is not there")
            + ", and there is no memfit_oom.jsonl. Train with MEMFIT.MONITOR.PERIOD 20"
        )
    snapshots = sorted(folder.glob("memfit_memory_*.json"), key=lambda path: path.stat().st_mtime)
    snapshot = (_read_lines(snapshots[-1]) or [{}])[0] if snapshots else {}
    # Micro-batches are in every line, reports of the monitor in some.
    lines = [line for line in metrics if any(key.startswith("memfit/") for key in line)]
    return Run(lines, events, snapshot.get("owners", {}), snapshot.get("iteration"))


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    text = path.read_text(errors="replace").splitlines()
    found = [_json(line) for line in text]
    lines = [line for line in found if isinstance(line, dict)]
    if len(lines) < len(text):  # a run that is killed may leave half a line
        logger.warning("%s: %d of %d lines are torn", path, len(text) - len(lines), len(text))
    return lines


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
