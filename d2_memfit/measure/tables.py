# Copyright (c) the d2_memfit developers.
"""Tables and a picture of the measurements of a card."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from .outside import constants_of

__all__ = ["draw", "markdown"]

Results = dict[str, Any]

_VERSIONS = {
    "PyTorch": "pytorch",
    "CUDA": "cuda",
    "cuDNN": "cudnn",
    "Detectron2": "detectron2",
    "Python": "python",
}
_TITLES = {
    "zoo": "Estimated and measured, configs of the zoo",
    "plans": "Plans, trained under their budget",
    "blocks": "Blocks of Mask R-CNN R50-FPN, chosen one by one",
    "crowded": "A crowded image in a window of eight",
    "presets": "Presets under their caps",
    "recovery": "Recovery from a batch that does not fit",
    "techniques": "Techniques, Mask R-CNN R50-FPN",
    "plain": "Trainers, the same",
    "outside": "Outside the allocator",
    "constants": "Constants of the device file",
}
_FEW = 3  # names in a cell


def markdown(results: Results) -> str:
    """Make tables of the results; failed measurements give their reason."""
    (machine,) = results["machine"]
    lines = [f"## {machine['card']}", ""]
    if machine["rehearsal"]:
        lines += ["A rehearsal on a CPU: these figures are of no card.", ""]
    total = f"{machine['total_gb']:.2f} GB. " if "total_gb" in machine else ""
    stated = [f"{name} {machine[key]}" for name, key in _VERSIONS.items() if machine.get(key)]
    lines += [f"{total}{', '.join(stated)}. {results['date']}.", ""]
    outside = results.get("outside", [])
    others = {
        "outside": [_of_outside(r) for r in outside if "file" not in r],
        "constants": _constants(outside),
    }
    for job, title in _TITLES.items():
        records = others[job] if job in others else results.get(job, [])
        if records:
            lines += [f"### {title}", "", _table(records), ""]
    for job, error in results["errors"].items():
        lines += [f"Not measured to the end: {job} ({error}).", ""]
    return "\n".join(lines)


def _table(records: Sequence[Results]) -> str:
    """A table of records: a column for each key that has a value, errors in the last one."""
    keys = dict.fromkeys(key for r in records for key in r if key != "error")
    columns = {key.replace("_", " "): [_text(key, r.get(key)) for r in records] for key in keys}
    columns[""] = [r.get("error", "") for r in records]
    kept = {name: cells for name, cells in columns.items() if any(cells)}
    return str(tabulate(kept, headers="keys", tablefmt="pipe", disable_numparse=True))


def _text(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key.endswith("_error"):
        return f"{value:+.1%}"
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, list) and value and isinstance(value[0], str):
        more = f" and {len(value) - _FEW} more" if len(value) > _FEW else ""
        return ", ".join(value[:_FEW]) + more
    return " + ".join(map(str, value)) if isinstance(value, list) else str(value)


def _of_outside(record: Results) -> Results:
    what = record.get("after", "more")
    if "ranks" in record:
        what = f"NCCL between {record['ranks']} ranks"
    elif "workspace" in record:
        what = f"workspaces of {record['workspace']}, in the allocator"
    error = record.get("error") or record.get("not_measured") or ""
    return {"what": what, "MB": record.get("mb"), "error": error}


def _constants(records: Sequence[Results]) -> list[Results]:
    """What was measured of the constants of a device file, and what the file has."""
    files = [r for r in records if "file" in r]
    return [
        {"constant": name, "measured": value, f"in {of_file['file']}.yaml": of_file[name]}
        for of_file in files
        for name, value in constants_of(records).items()
    ]


def draw(results: Results, path: Path) -> None:
    """Draw measured memory and time against what was estimated.

    Panels without measurements stay empty. Plans are also predicted by the card's own speeds: the
    rest is the error of the model of time.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    memory = {job: ("training_gb", "training_estimated_gb") for job in ("zoo", "presets")}
    memory.update({job: ("gb", "estimated_gb") for job in ("plans", "blocks", "techniques")})
    times = {job: ("seconds", "predicted_seconds") for job in ("plans", "blocks", "techniques")}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 6), layout="constrained")
    _scatter(left, results, memory)
    left.set(title="Memory of training", xlabel="measured, peak GB", ylabel="estimated GB")
    own = [r for r in results.get("plans", []) if "seconds" in r]
    predicted = [r["predicted_by_own_speeds"] for r in own]
    right.scatter([r["seconds"] for r in own], predicted, marker="+", label="plans, own speeds")
    _scatter(right, results, times)
    right.set(title="Time of an iteration", xlabel="measured s", ylabel="predicted s, at least")
    figure.suptitle(results["machine"][0]["card"])
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _scatter(axes: Any, results: Results, keys: Mapping[str, tuple[str, str]]) -> None:
    """Draw the values of two keys of each job's records, and the diagonal."""
    for (job, (measured, expected)), mark in zip(keys.items(), "os^vD"):
        records = [r for r in results.get(job, []) if measured in r and expected in r]
        values = [[r[key] for r in records] for key in (measured, expected)]
        axes.scatter(*values, marker=mark, label=job)
    most = max([1e-3, *axes.get_xlim(), *axes.get_ylim()])
    axes.plot([0, most], [0, most], color="gray", linewidth=1)
    axes.legend()
