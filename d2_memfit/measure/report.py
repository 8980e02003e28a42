"""What was measured of a card, as tables and as a picture."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Optional

from tabulate import tabulate

__all__ = ["draw", "markdown"]

Results = dict[str, Any]


def markdown(results: Results) -> str:
    """Tables of what is there; what failed says why."""
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
        ("Checks", _checks(results)),
        ("Estimated and measured, configs of the zoo", _comparison(results.get("zoo", []))),
        ("Presets under their caps", _comparison(results.get("presets", []))),
        ("Recovery from a batch that does not fit", _recovery(results)),
        ("Techniques, Mask R-CNN R50-FPN with 2 images", _techniques(results)),
        ("Trainers, the same", _plain(results)),
        ("Outside the allocator", _outside(results)),
    ):
        if table:
            lines += [f"### {title}", "", table, ""]
    for job, error in results["errors"].items():
        lines += [f"Not measured to the end: {job} ({error}).", ""]
    return "\n".join(lines)


def draw(results: Results, path: Path) -> None:
    """Estimates against measurements, and what techniques save and cost."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for job, mark in (("zoo", "o"), ("presets", "s")):
        rows = [r for r in results.get(job, []) if "training_gb" in r]
        left.scatter(
            [r["training_gb"] for r in rows],
            [r["training_estimated_gb"] for r in rows],
            marker=mark,
            label=f"{job}, training",
        )
    most = max([1e-3, *left.get_xlim(), *left.get_ylim()])
    left.plot([0, most], [0, most], color="gray", linewidth=1)
    left.set(xlabel="measured, peak allocated GB", ylabel="estimated GB")
    left.legend()
    rows = [r for r in results.get("techniques", []) if r.get("technique") and "gb" in r]
    without = next((r for r in results.get("techniques", []) if r["technique"] is None), None)
    if without is not None and "gb" in without:
        names = [r["technique"] for r in rows]
        places = range(len(rows))
        right.barh([p - 0.2 for p in places], [r["gb"] / without["gb"] for r in rows], 0.4)
        right.barh([p + 0.2 for p in places], [r["time_factor"] for r in rows], 0.4)
        right.set_yticks(list(places), names)
        right.axvline(1, color="gray", linewidth=1)
        right.set(xlabel="memory (blue) and time (orange) of a step, without it 1")
    figure.suptitle(results["machine"][0]["card"])
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _checks(results: Results) -> str:
    checks = results.get("checks", [])
    failed = [[c["name"], c["error"]] for c in checks if "error" in c]
    if not checks:
        return ""
    text = f"{len(checks) - len(failed)} of {len(checks)} passed."
    return f"{text}\n\n{_table(failed, ['failed', 'why'])}" if failed else text


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


def _outside(results: Results) -> str:
    rows = [[r["after"], r["mb"]] for r in results.get("outside", [])]
    return _table(rows, ["after", "MB"])


def _table(rows: Sequence[Sequence[Optional[Any]]], header: Sequence[str]) -> str:
    """Without columns that have nothing in them."""
    if not rows:
        return ""
    width = len(header)
    full = [[*row, *[None] * (width - len(row))] for row in rows]
    kept = [i for i in range(width) if any(row[i] not in (None, "") for row in full)]
    cells = [[row[i] for i in kept] for row in full]
    return tabulate(cells, [header[i] for i in kept], tablefmt="pipe", floatfmt=".3f")
