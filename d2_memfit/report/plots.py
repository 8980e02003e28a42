# Copyright (c) the d2_memfit developers.
"""Plots of a run's memory: a PNG and an interactive HTML page."""

import html
from pathlib import Path
from typing import Any

from ..common.files import output_file
from ..common.units import GB
from ..errors import ConfigError, printable
from .records import RecordedRun

__all__ = ["write_html", "write_png"]

# Okabe and Ito, "Color Universal Design": colour-blind people can tell them apart. Lines differ in
# their dashes as well.
_BLUE, _ORANGE, _GREEN, _RED, _SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9"
_SERIES = (  # scalar, label, colour, dash of matplotlib and of plotly
    ("allocated_peak_gb", "allocated, peak", _BLUE, "-", "solid"),
    ("reserved_peak_gb", "reserved, peak", _ORANGE, "--", "dash"),
    ("allocated_gb", "allocated after the step", _SKY, ":", "dot"),
)
_OF_IMAGE = ("file_name", "height", "width", "num_instances")
_EVENT_COLUMNS = ("iteration", "rank", "phase", "micro-batch", "images", "action", "error")


def write_png(run: RecordedRun, path: Path) -> None:
    """Plot memory, budget and out-of-memory errors over iterations, and the micro-batch below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, batch) = pyplot.subplots(
        2, 1, sharex=True, figsize=(10, 6), height_ratios=(3, 1), layout="constrained"
    )
    for name, label, color, dash, _ in _SERIES:
        memory.plot(*run.series(name), label=label, color=color, linestyle=dash)
    if run.budget_gb:
        memory.axhline(run.budget_gb, label="budget", color="black", linestyle="-.")
    if run.events:
        iterations = [event["iteration"] for event in run.events]
        reserved = [event["reserved_gb"] for event in run.events]
        memory.scatter(
            iterations, reserved, label="out of memory", color=_RED, marker="X", zorder=3
        )
    memory.set_ylabel("GB (2^30 bytes)")
    memory.set_ylim(bottom=0)
    memory.legend()
    batch.step(*run.series("micro_batch"), color=_GREEN, where="post")
    batch.set_ylabel("micro-batch")
    batch.set_ylim(bottom=0)
    batch.set_xlabel("iteration")
    with output_file(path) as file:
        figure.savefig(file, dpi=120)
    pyplot.close(figure)


def write_html(run: RecordedRun, path: Path) -> None:
    """Write the same plots as an HTML page, with the owners at the peak and all errors.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        from plotly.subplots import make_subplots
    except ImportError as e:
        raise ConfigError(f"memory.html needs plotly ({e}): pip install plotly") from e

    owners_title = "Who has the memory"
    if run.owners_iteration is not None:
        owners_title += f" at the peak of iteration {run.owners_iteration}"
    figure = make_subplots(
        rows=4,
        specs=[[{"type": "xy"}], [{"type": "xy"}], [{"type": "xy"}], [{"type": "table"}]],
        row_heights=[0.38, 0.14, 0.16, 0.32],
        vertical_spacing=0.07,
        subplot_titles=["Memory", "Micro-batch", owners_title, "Out-of-memory errors"],
    )
    for name, label, color, _, dash in _SERIES:
        x, y = run.series(name)
        line = {"color": color, "dash": dash}
        figure.add_scatter(x=x, y=y, name=label, line=line, mode="lines", row=1, col=1)
    if run.budget_gb:
        figure.add_hline(run.budget_gb, line_dash="dashdot", annotation_text="budget", row=1, col=1)
    events = run.events
    figure.add_scatter(
        x=[event["iteration"] for event in events],
        y=[event["reserved_gb"] for event in events],
        text=[_escaped(f"{event['phase']}: {event['action']}") for event in events],
        name="out of memory",
        mode="markers",
        marker={"color": _RED, "symbol": "x", "size": 10},
        row=1,
        col=1,
    )
    x, y = run.series("micro_batch")
    line = {"color": _GREEN, "shape": "hv"}
    figure.add_scatter(x=x, y=y, name="micro-batch", line=line, showlegend=False, row=2, col=1)
    figure.update_xaxes(matches="x", row=1, col=1)
    figure.update_xaxes(matches="x", title="iteration", row=2, col=1)
    colorway = (_BLUE, _ORANGE, _GREEN, _RED, _SKY, "#CC79A7", "#F0E442", "#999999")
    patterns = ("", "/", "\\", "x", ".", "+", "-", "|")  # one for each round of the colours
    for i, (owner, num_bytes) in enumerate(run.owners.items()):
        figure.add_bar(
            y=["peak"],
            x=[num_bytes / GB],
            name=_escaped(owner),
            orientation="h",
            marker={
                "color": colorway[i % len(colorway)],
                "pattern": {"shape": patterns[i // len(colorway) % len(patterns)]},
            },
            row=3,
            col=1,
        )
    figure.update_xaxes(title="GB", row=3, col=1)
    figure.add_table(
        header={"values": list(_EVENT_COLUMNS), "align": "left"},
        cells={"values": list(zip(*map(_event_row, events))), "align": "left"},
        row=4,
        col=1,
    )
    figure.update_yaxes(title="GB (2^30 bytes)", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(rangemode="tozero", row=2, col=1)
    figure.update_layout(
        title="d2_memfit: memory of a run",
        height=1300,
        barmode="stack",
        hovermode="x unified",
        template="plotly_white",
    )
    with output_file(path) as file:
        file.write(figure.to_html(include_plotlyjs=True).encode())


def _event_row(event: dict[str, Any]) -> list[str]:
    images = ", ".join(
        "{} ({} x {}, {})".format(*map(image.get, _OF_IMAGE)) for image in event["images"]
    )
    values = [event["iteration"], event["rank"], event["phase"], event["micro_batch"]]
    return [_escaped(v) for v in (*values, images, event["action"], event["error"])]


def _escaped(value: Any) -> str:
    return html.escape(printable(str(value)))
