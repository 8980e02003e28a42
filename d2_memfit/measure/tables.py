# Copyright (c) the d2_memfit developers.
"""Tables and a summary of the measurements of a card."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from tabulate import tabulate

from .items import Record
from .outside import constants_of
from .results import Results

__all__ = ["TITLES", "markdown", "summary"]

_VERSIONS = {
    "PyTorch": "pytorch",
    "CUDA": "cuda",
    "cuDNN": "cudnn",
    "Detectron2": "detectron2",
    "Python": "python",
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


def markdown(results: Results) -> str:
    """Make tables of the results; failed measurements give their reason."""
    machine = results.machine
    lines = [f"## {machine['card']}", ""]
    if machine["rehearsal"]:
        lines += ["A rehearsal on a CPU. These are not figures of a card.", ""]
    total = f"{machine['total_gb']:.2f} GB. " if "total_gb" in machine else ""
    stated = [f"{name} {machine[key]}" for name, key in _VERSIONS.items() if machine.get(key)]
    lines += [f"{total}{', '.join(stated)}. {machine['date']}.", ""]
    outside = [_of_outside(r) for r in results.outside if "file" not in r]
    tables = {
        **{title: _of_group(results, group) for group, title in TITLES.items()},
        "Outside the allocator": outside,
        "Constants of the device file": _constants(results.outside),
    }
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
        keys = [key for key, *_ in results.pairs() if key.partition("/")[0] == group]
        for value in _COMPARED:
            ratios = [ratio for key in keys if (ratio := results.ratio(key, value)) is not None]
            if ratios:
                ends = (median(ratios), min(ratios), max(ratios))
                compared.setdefault(group, {})[value] = [round(ratio, 3) for ratio in ends]
    errors = {key: r["error"][:80] for key, _, r in results.pairs() if "error" in r}
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
    for key, expected, measured in results.pairs():
        if key.partition("/")[0] != group:
            continue
        row: Record = {group: key.partition("/")[2]}
        row.update({k: v for k, v in measured.items() if k not in _HIDDEN})
        for value, title in _COMPARED.items():
            row[f"{title}, expected"] = expected.get(value)
            row[title] = measured.get(value)
            ratio = results.ratio(key, value)
            row[f"{title}, x"] = None if ratio is None else f"{ratio:.2f}"
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


def _of_outside(record: Record) -> Record:
    what = record.get("after", "more")
    if "ranks" in record:
        what = f"NCCL between {record['ranks']} ranks"
    elif "workspace" in record:
        what = f"workspaces of {record['workspace']}, in the allocator"
    error = record.get("error") or record.get("not_measured")
    return {"what": what, "MB": record.get("mb"), "error": error}


def _constants(records: Sequence[Record]) -> list[Record]:
    """Rows that compare measured constants with those of the device file."""
    files = [r for r in records if "file" in r]
    return [
        {"constant": name, "measured": value, f"in {of_file['file']}.yaml": of_file[name]}
        for of_file in files
        for name, value in constants_of(records).items()
    ]
