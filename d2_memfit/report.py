# Copyright (c) the d2_memfit developers.
"""One HTML page with an answer, and the memory of a step by owner. It loads no other files."""

import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from .common import GB
from .common.files import output_file
from .planner.timeline import Allocate, Allocation, Change

__all__ = ["write_page"]

_WIDTH, _HEIGHT, _LEFT, _TOP = 1000, 360, 60, 20  # of a picture, and of its margins
_MOST_STEPS = 400  # of a picture
_LARGEST = 15  # tensors of the table
_COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#9c755f")
_STYLE = """body { font: 16px/1.5 sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
pre { background: #f3f3f3; padding: 1rem; overflow: auto; white-space: pre-wrap }
svg { width: 100%; font-size: 12px } td, th { padding: 0 1rem 0 0; text-align: left }"""


class _Step(NamedTuple):
    """A moment: its phase, and the bytes that are allocated, in total and by owner."""

    phase: str
    total: int
    owners: Counter[str]


def write_page(
    path: Path,
    title: str,
    texts: Mapping[str, str],
    steps: Optional[Mapping[str, Iterable[Change]]] = None,
    limit_gb: Optional[float] = None,
) -> None:
    """Write a page as HTML. Its texts are escaped.

    Args:
        texts: what the command prints and keys to copy, by heading. Empty ones are left out.
        steps: allocations and frees of dry runs, by name.
        limit_gb: a line through the pictures.
    """
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for heading, text in texts.items():
        if text:
            parts.append(f"<h2>{html.escape(heading)}</h2><pre>{html.escape(text)}</pre>")
    for name, events in (steps or {}).items():
        moments, largest = _replayed(events)
        parts += [f"<h2>Memory of a step, {html.escape(name)}</h2>", _picture(moments, limit_gb)]
        parts.append(_table(largest))
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    with output_file(path) as file:
        file.write("\n".join(["<!DOCTYPE html>", head, *parts]).encode())


def _replayed(events: Iterable[Change]) -> tuple[list[_Step], list[Allocation]]:
    """The moments of a dry run, and the largest allocations at its peak."""
    now: Counter[str] = Counter()
    alive: dict[Allocation, None] = {}
    moments: list[_Step] = []
    at_peak: list[Allocation] = []
    total = peak = 0
    for event in events:
        now[event.allocation.owner] += event.num_bytes
        total += event.num_bytes
        if isinstance(event, Allocate):
            alive[event.allocation] = None
        else:
            alive.pop(event.allocation, None)
        phase = event.allocation.phase  # of the allocation, also when it is freed later
        if phase != "setup":
            moments.append(_Step(phase, total, now.copy()))
        if total > peak:
            peak, at_peak = total, list(alive)
    every = -(-len(moments) // _MOST_STEPS) or 1
    spans = (moments[i : i + every] for i in range(0, len(moments), every))
    largest = sorted(at_peak, key=lambda a: a.num_bytes, reverse=True)[:_LARGEST]
    return [max(span, key=lambda step: step.total) for span in spans], largest


def _picture(moments: Sequence[_Step], limit_gb: Optional[float]) -> str:
    """An area for each owner, one on the other, as SVG."""
    least = Counter({o: min(step.owners[o] for step in moments) for s in moments for o in s.owners})
    owners = [owner for owner, _ in least.most_common()]  # what stays is below
    most = max([limit_gb or 0.0, *(step.total / GB for step in moments)]) or 1.0

    def x(step: float) -> float:
        return round(_LEFT + step * _WIDTH / max(len(moments), 1), 1)

    def y(gigabytes: float) -> float:
        return round(_TOP + _HEIGHT * (1 - gigabytes / most), 1)

    shapes, floor = [], [0.0] * len(moments)
    for number, owner in enumerate(owners):
        top = [below + step.owners[owner] / GB for below, step in zip(floor, moments)]
        outline = [(x(i), y(value)) for i, value in enumerate(top)]
        outline += [(x(i), y(value)) for i, value in reversed(list(enumerate(floor)))]
        points = " ".join(f"{left},{height}" for left, height in outline)
        colour, name = _COLOURS[number % len(_COLOURS)], html.escape(owner)
        shapes.append(f'<polygon points="{points}" fill="{colour}"><title>{name}</title></polygon>')
        place = f'x="{_LEFT + 12 + number % 6 * 160}" y="{_TOP + _HEIGHT + 36 + number // 6 * 16}"'
        shapes.append(f'<text {place} fill="{colour}">&#9632; {name}</text>')
        floor = top
    for i, step in enumerate(moments):
        if i == 0 or step.phase != moments[i - 1].phase:
            shapes.append(_line(x(i), _TOP, x(i), _TOP + _HEIGHT, "#ccc"))
            shapes.append(f'<text x="{x(i)}" y="{_TOP - 6}">{html.escape(step.phase)}</text>')
    for gigabytes in (most / 4, most / 2, most * 3 / 4, most):
        shapes.append(f'<text x="0" y="{y(gigabytes) + 4}">{gigabytes:.1f} GB</text>')
    if limit_gb:
        shapes.append(_line(_LEFT, y(limit_gb), _LEFT + _WIDTH, y(limit_gb), "red"))
        shapes.append(f'<text x="{_LEFT + 4}" y="{y(limit_gb) + 14}" fill="red">the limit</text>')
    size = f"0 0 {_LEFT + _WIDTH} {_TOP + _HEIGHT + 80}"
    return f'<svg viewBox="{size}" role="img">{"".join(shapes)}</svg>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"/>'


def _table(largest: Sequence[Allocation]) -> str:
    """The largest tensors at the peak."""
    rows = [("MB", "owner", "module", "tensor", "phase")]
    rows += [(f"{a.num_bytes / 2**20:.1f}", a.owner, a.module, str(a), a.phase) for a in largest]
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
