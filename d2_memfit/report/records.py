# Copyright (c) the d2_memfit developers.
"""Reading of the files in which a run has recorded its memory."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from ..common.reading import check_fields, checked
from ..errors import DataError

__all__ = ["RecordedRun", "read_run"]

logger = logging.getLogger(__name__)

# Fields that are drawn, and their types.
_EVENT = {"iteration": int, "rank": int, "micro_batch": int, "reserved_gb": float}
_EVENT |= {"phase": str, "action": str, "error": str, "images": list[dict[str, Any]]}
_SNAPSHOT = {"iteration": int, "owners": dict[str, float]}


@dataclass(frozen=True)
class RecordedRun:
    """The memory of a run over its iterations."""

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
            if line.get("memfit/budget_used") and "memfit/reserved_peak_gb" in line:
                return line["memfit/reserved_peak_gb"] / line["memfit/budget_used"]
        return None


def read_run(output_dir: str) -> RecordedRun:
    """Read metrics.json, memfit_oom.jsonl and the last memfit_memory_*.json of an OUTPUT_DIR.

    Raises:
        DataError: the files say nothing about memory, a file cannot be read, or a field is missing
            or has another type.
    """
    folder = Path(output_dir)
    if not folder.is_dir():
        raise DataError(f"{output_dir} is not a folder. Name the OUTPUT_DIR of a run")
    metrics = _read(folder / "metrics.json", {"iteration": int})
    events = _read(folder / "memfit_oom.jsonl", _EVENT)
    reports = [line for line in metrics if "memfit/allocated_gb" in line]
    if not reports and not events:
        raise DataError(
            f"{output_dir} has no reports of memory: metrics.json "
            + ("has no memfit/allocated_gb" if metrics else "is not there")
            + ", and there is no memfit_oom.jsonl. Train with MEMFIT.MONITOR.PERIOD 20"
        )
    snapshots = sorted(folder.glob("memfit_memory_*.json"), key=lambda path: path.stat().st_mtime)
    snapshot = (_read(snapshots[-1], _SNAPSHOT) or [{}])[0] if snapshots else {}
    # All lines have micro-batches. Some have reports of the monitor.
    lines = [line for line in metrics if any(key.startswith("memfit/") for key in line)]
    return RecordedRun(lines, events, snapshot.get("owners", {}), snapshot.get("iteration"))


def _read(path: Path, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The JSON object of a file, or of each of its lines; none if there is no file.

    Args:
        fields: types of the fields that each must have. Fields of the monitor must be finite
            numbers.
    """
    if not path.exists():
        return []
    text = Path(checked(path)).read_text(errors="replace")
    parts, lines = [text] if _json(text) else text.splitlines(), []
    for number, line in enumerate(parts, 1):
        if isinstance(values := _json(line), dict):
            own = {key: float for key in values if key.startswith("memfit/")}
            check_fields(values, {**fields, **own}, f"{path}, line {number}")
            lines.append(values)
    if len(lines) < len(parts):  # a run that is killed may leave half a line
        logger.warning(
            "%s: %d of %d lines are incomplete and are skipped",
            path,
            len(parts) - len(lines),
            len(parts),
        )
    return lines


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (RecursionError, ValueError):
        return None
