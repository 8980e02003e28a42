# Copyright (c) the d2_memfit developers.
"""Tables of the measurements of a card."""

from collections.abc import Iterable, Sequence
from typing import Any, Optional

from tabulate import tabulate

from ..planner.search import BLOCKWISE
from .outside import constants_of

__all__ = ["markdown"]

Results = dict[str, Any]


def markdown(results: Results) -> str:
    """Make tables of the results; failed measurements give their reason."""
    (machine,) = results["machine"]
    versions = {
        "PyTorch": "pytorch",
        "CUDA": "cuda",
        "cuDNN": "cudnn",
        "Detectron2": "detectron2",
        "Python": "python",
    }
    lines = [f"## {machine['card']}", ""]
    if machine["rehearsal"]:
        lines += ["A rehearsal on a CPU: these figures are of no card.", ""]
    total = f"{machine['total_gb']:.2f} GB. " if "total_gb" in machine else ""
    stated = [f"{name} {machine[key]}" for name, key in versions.items() if machine.get(key)]
    lines += [f"{total}{', '.join(stated)}. {results['date']}.", ""]
    for title, table in (
        ("Estimated and measured, configs of the zoo", _comparison(results.get("zoo", []))),
        ("Plans, trained under their budget", _plans(results)),
        ("Blocks of Mask R-CNN R50-FPN, chosen one by one", _blocks(results)),
        ("A crowded image in a window of eight", _crowded(results)),
        ("Presets under their caps", _comparison(results.get("presets", []))),
        ("Recovery from a batch that does not fit", _recovery(results)),
        ("Techniques, Mask R-CNN R50-FPN with 2 images", _techniques(results)),
        ("Trainers, the same", _plain(results)),
        ("Outside the allocator", _outside(results)),
        ("Constants of the device file", _constants(results)),
    ):
        if table:
            lines += [f"### {title}", "", table, ""]
    for job, error in results["errors"].items():
        lines += [f"Not measured to the end: {job} ({error}).", ""]
    return "\n".join(lines)


def _comparison(records: Iterable[Results]) -> str:
    rows = []
    for r in records:
        if "error" in r:
            rows.append([r["config"], "", r["error"]])
            continue
        row = [r["config"], r.get("budget_gb"), r["images"]]
        for phase in ("training", "evaluation"):
            measured = r.get(f"{phase}_gb")
            error = None if measured is None else f"{r[f'{phase}_error']:+.1%}"
            row += [r.get(f"{phase}_estimated_gb"), measured, error]
        rows.append([*row, r.get("training_estimated_device_gb"), r.get("training_device_gb")])
    header = ["config", "budget, GB", "images", "training, GB estimated", "measured", "error"]
    header += ["evaluation, GB estimated", "measured", "error"]
    return _table(rows, [*header, "of the device, GB estimated", "measured"])


def _recovery(results: Results) -> str:
    return _table([[k, v] for r in results.get("recovery", []) for k, v in r.items()], ["", ""])


def _techniques(results: Results) -> str:
    keys = ("gb", "estimated_gb", "seconds", "time_factor", "predicted_time_factor")
    rows = [
        [r["technique"] or "none", *(r.get(key) for key in keys), r.get("error")]
        for r in results.get("techniques", [])
    ]
    header = ["technique", "GB", "GB estimated", "s", "time x", "time x predicted", ""]
    return _table(rows, header)


def _plain(results: Results) -> str:
    keys = ("gb", "reserved_gb", "seconds", "error")
    rows = [[r["trainer"], *(r.get(key) for key in keys)] for r in results.get("plain", [])]
    return _table(rows, ["trainer", "GB allocated", "GB reserved", "s", ""])


def _plans(results: Results) -> str:
    keys = ("precision", "budget_gb", "images", "micro_batch")
    numbers = ("estimated_gb", "gb", "estimated_device_gb", "device_gb")
    times = ("predicted_seconds", "predicted_by_own_speeds", "seconds", "error")
    rows = [
        [*map(r.get, keys), ", ".join(r.get("techniques", [])), *map(r.get, (*numbers, *times))]
        for r in results.get("plans", [])
    ]
    header = ["precision", "budget, GB", "images", "at a time", "techniques"]
    header += ["GB estimated", "measured", "of the device, GB estimated", "measured"]
    return _table(rows, [*header, "s predicted", "by its own speeds", "measured", ""])


def _blocks(results: Results) -> str:
    keys = [
        "images",
        "estimated_gb",
        "gb",
        "predicted_seconds",
        "seconds",
        "predicted_time_factor",
        "time_factor",
        "gradient_difference",
        "error",
    ]
    rows = []
    for r in results.get("blocks", []):
        recomputed, offloaded = (r.get(name, []) for name in BLOCKWISE)
        rows.append([r["blocks"], len(recomputed), len(offloaded) or None, *map(r.get, keys)])
    header = ["blocks", "recomputed", "offloaded", "images", "GB estimated", "measured"]
    header += ["s predicted", "measured", "time x predicted", "measured", "gradients differ by", ""]
    return _table(rows, header)


def _crowded(results: Results) -> str:
    keys = ("micro_batches", "budget_gb", "oom_events", "retried_images")
    rows = [
        [*map(r.get, keys), " + ".join(map(str, r.get("last_micro_batches", []))), r.get("error")]
        for r in results.get("crowded", [])
    ]
    header = ["micro-batches", "budget, GB", "out of memory", "images run again"]
    return _table(rows, [*header, "those of the last iteration", ""])


def _outside(results: Results) -> str:
    rows = []
    for r in results.get("outside", []):
        workspace, ranks = r.get("workspace"), r.get("ranks")
        what = r.get("after") or (ranks and f"NCCL between {ranks} ranks")
        what = what or (workspace and f"workspaces of {workspace}, in the allocator")
        if "file" not in r:
            why_not = r.get("not_measured") or r.get("error")
            rows.append([what or "more", r.get("mb"), why_not])
    return _table(rows, ["what", "MB", ""])


def _constants(results: Results) -> str:
    records = results.get("outside", [])
    files = [r for r in records if "file" in r]
    measured = constants_of(records)
    if not files:
        return ""
    rows = [[name, _text(measured[name]), _text(files[0][name])] for name in measured]
    return _table(rows, ["constant", "measured", f"in {files[0]['file']}.yaml"])


def _text(value: Any) -> Any:
    """Two numbers as one cell."""
    return ", ".join(f"{mb:.0f}" for mb in value) if isinstance(value, list) else value


def _table(rows: Sequence[Sequence[Optional[Any]]], header: Sequence[str]) -> str:
    """A table without empty columns."""
    if not rows:
        return ""
    width = len(header)
    full = [[*row, *[None] * (width - len(row))] for row in rows]
    kept = [i for i in range(width) if any(row[i] not in (None, "") for row in full)]
    cells = [[row[i] for i in kept] for row in full]
    return tabulate(cells, [header[i] for i in kept], tablefmt="pipe", floatfmt=".3f")
