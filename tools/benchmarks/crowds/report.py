# Copyright (c) the d2_memfit developers.
"""The tables about crowds, from the lines of docs/crowds.jsonl."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

from pages import write_section

from d2_memfit.common.units import MB

from ..common import markdown_table

DOCS = Path(__file__).resolve().parents[3] / "docs"
TOOL = "benchmark.py crowds"

Line = dict[str, Any]


def write(docs: Path) -> str:
    """Write the table of steps into docs/TECHNIQUES.md; return it and that of trainings."""
    lines = [json.loads(x) for x in (docs / "crowds.jsonl").read_text().splitlines()]
    parts = {
        part: [line for line in lines if line["part"] == part] for part in ("step", "training")
    }
    tables = []
    if parts["step"]:
        tables.append(table_of_steps(parts["step"]))
        write_section(docs / "TECHNIQUES.md", "crowds", TOOL, tables[-1])
    if parts["training"]:
        tables.append(table_of_trainings(parts["training"]))
    return "\n\n".join(tables)


def table_of_steps(lines: Sequence[Line]) -> str:
    """Peak and time of each model and side, by the number of objects."""
    objects = sorted({line["objects"] for line in lines})
    rows = []
    for model in unique(lines, "model"):
        for side, found in sides_of(lines, model).items():
            cells = [cell(side, found.get(num)) for num in objects]
            differences = [x["difference"] for x in found.values() if x["difference"] is not None]
            largest = f"{max(differences):.0g}" if differences and side != "plain" else ""
            rows.append([model, side, *cells, growth(side, found), largest])
    header = ["model", "", *(f"{num:,} objects" for num in objects)]
    header += ["MiB per 1,000 objects", "largest difference"]
    machines = "; ".join(unique(lines, "machine"))
    return f"{machines}.\n\n{markdown_table(header, rows)}"


def table_of_trainings(lines: Sequence[Line]) -> str:
    """Fate, peak, time, recovery and weights of each model and side."""
    rows = []
    for model in unique(lines, "model"):
        of_model = [line for line in lines if line["model"] == model]
        # Only the techniques depend on the version: of the other sides, the last one counts.
        found = {
            line["label"] if line["side"] == "technique" else line["side"]: line
            for line in of_model
        }
        for side, line in found.items():
            limit = line["budget_gb"]
            gap = line["difference"]
            cells = [
                f"{limit:.2f}" if limit else "none",
                f"{line['iterations']}, then out of memory"
                if line["error"]
                else line["iterations"],
                f"{line['peak_gb']:.2f}",
                f"{line['seconds']:.0f}",
                line["events"],
                "" if gap is None or side == "enough memory" else f"{gap:.0g}",
            ]
            rows.append([model, side, *cells])
    header = ["model", "", "limit, GB", "iterations", "peak, GB", "CPU s", "events of recovery"]
    machines = "; ".join(unique(lines, "machine"))
    return f"{machines}.\n\n{markdown_table([*header, 'difference of weights'], rows)}"


def sides_of(lines: Sequence[Line], model: str) -> dict[str, dict[int, Line]]:
    """Lines of a model by side and number of objects. Plain is measured with each label."""
    of_model = [line for line in lines if line["model"] == model]
    sides = {"plain": {line["objects"]: line for line in of_model}}
    for label in unique(of_model, "label"):
        sides[label] = {line["objects"]: line for line in of_model if line["label"] == label}
    return sides


def peak(side: str, line: Line) -> Optional[int]:
    return line["plain" if side == "plain" else "technique"]["peak_bytes"]


def cell(side: str, line: Optional[Line]) -> str:
    if line is None:
        return ""
    size = peak(side, line)
    if size is None:
        return "does not fit"
    plain_s, technique_s = (line[name]["seconds"] for name in ("plain", "technique"))
    if side == "plain":
        time = f"{plain_s:.2f} s"
    else:
        time = f"{technique_s / plain_s:.2f} x" if plain_s else f"{technique_s:.2f} s"
    return f"{size / MB:,.0f} MiB, {time}"


def growth(side: str, lines: dict[int, Line]) -> str:
    """Slope of the peak in the upper half of the numbers of objects that fit."""
    peaks = {num: size for num, line in lines.items() if (size := peak(side, line)) is not None}
    upper = sorted(peaks)[len(peaks) // 2 - (len(peaks) == 2) :]
    if len(upper) < 2:
        return ""
    first, last = upper[0], upper[-1]
    return f"{1000 * (peaks[last] - peaks[first]) / (last - first) / MB:,.0f}"


def unique(lines: Sequence[Line], name: str) -> list[str]:
    return list(dict.fromkeys(line[name] for line in lines))
