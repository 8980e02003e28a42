# Copyright (c) the d2_memfit developers.
"""A picture of the measurements of a card."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .outside import constants_of

__all__ = ["draw"]

Results = dict[str, Any]

_BLUE, _ORANGE = "#0072b2", "#e69f00"  # colours that colour-blind people can tell apart


def draw(results: Results, path: Path) -> None:
    """Draw estimates and measurements of memory and time, and the effect of techniques.

    Panels without measurements stay empty.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 3, figsize=(16, 9), layout="constrained")
    draws = (_memory, _techniques, _trainers, _times, _crowded, _constants)
    for axes, draw_panel in zip(panels.flat, draws):
        draw_panel(axes, results)
    figure.suptitle(results["machine"][0]["card"])
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _memory(axes: Any, results: Results) -> None:
    keys = {"zoo": "training_", "presets": "training_", "plans": "", "blocks": ""}
    for (job, prefix), mark in zip(keys.items(), "os^v"):
        rows = _with(results, job, f"{prefix}gb")
        measured = [r[f"{prefix}gb"] for r in rows]
        axes.scatter(measured, [r[f"{prefix}estimated_gb"] for r in rows], marker=mark, label=job)
    _diagonal(axes)
    axes.set(title="Memory of training", xlabel="measured, peak GB", ylabel="estimated GB")


def _times(axes: Any, results: Results) -> None:
    """Draw predicted and measured seconds.

    Plans are also predicted by the card's own speeds: the rest is the error of the model of time.
    """
    for job, mark in (("techniques", "o"), ("plans", "^"), ("blocks", "v")):
        rows = _with(results, job, "seconds")
        measured = [r["seconds"] for r in rows]
        axes.scatter(measured, [r["predicted_seconds"] for r in rows], marker=mark, label=job)
    rows = _with(results, "plans", "seconds")
    own = [r["predicted_by_own_speeds"] for r in rows]
    axes.scatter([r["seconds"] for r in rows], own, marker="+", label="plans, by its own speeds")
    _diagonal(axes)
    axes.set(title="Time of an iteration", xlabel="measured s", ylabel="predicted s, at least")


def _diagonal(axes: Any) -> None:
    most = max([1e-3, *axes.get_xlim(), *axes.get_ylim()])
    axes.plot([0, most], [0, most], color="gray", linewidth=1)
    axes.legend()


def _techniques(axes: Any, results: Results) -> None:
    without = next((r for r in _with(results, "techniques", "gb") if r["technique"] is None), None)
    rows = [r for r in _with(results, "techniques", "gb") if r["technique"]]
    if without is not None:
        bars = {
            "memory": [r["gb"] / without["gb"] for r in rows],
            "time": [r["time_factor"] for r in rows],
        }
        _bars(axes, [r["technique"] for r in rows], bars)
    axes.axvline(1, color="gray", linewidth=1)
    axes.set(title="Techniques: a step, without it 1")


def _trainers(axes: Any, results: Results) -> None:
    rows = _with(results, "plain", "seconds")
    bars = {"GB": [r["gb"] for r in rows], "s": [r["seconds"] for r in rows]}
    _bars(axes, [r["trainer"] for r in rows], bars)
    axes.set(title="Trainers: a step")


def _crowded(axes: Any, results: Results) -> None:
    rows = _with(results, "crowded", "oom_events")
    bars = {
        "out-of-memory errors": [r["oom_events"] for r in rows],
        "images run again": [r["retried_images"] for r in rows],
    }
    _bars(axes, [r["micro_batches"] for r in rows], bars)
    axes.set(title="A crowded image in a window")


def _constants(axes: Any, results: Results) -> None:
    records = results.get("outside", [])
    files = [r for r in records if "file" in r]
    measured = constants_of(records)
    if files:
        of_file = files[0]
        bars = {
            "measured": [_largest(measured[name]) for name in measured],
            f"in {of_file['file']}.yaml": [_largest(of_file[name]) for name in measured],
        }
        _bars(axes, list(measured), bars)
    axes.set(title="Constants of the device file", xlabel="MB")


def _largest(value: Any) -> float:
    return max(value) if isinstance(value, list) else value


def _bars(axes: Any, names: Sequence[str], values: dict[str, list[float]]) -> None:
    """A pair for each name, from the top."""
    places = range(len(names))
    for (label, lengths), offset, color in zip(values.items(), (-0.2, 0.2), (_BLUE, _ORANGE)):
        axes.barh([p + offset for p in places], lengths, 0.4, label=label, color=color)
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.legend()


def _with(results: Results, job: str, key: str) -> list[dict[str, Any]]:
    """The records of a job that have a value."""
    return [record for record in results.get(job, []) if key in record]
