# Copyright (c) the d2_memfit developers.
"""An HTML page with an answer, and the memory of a step tensor by tensor. It works offline."""

import html
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Optional

from ..common.files import output_file

__all__ = ["Bar", "Chart", "Measured", "Page", "Tensor", "write_page"]

_TEMPLATE = Path(__file__).with_name("page.html")


class Tensor(NamedTuple):
    """A rectangle of a chart. It is stored without field names, as a page has thousands of them.

    Attributes:
        begin, end: steps of the chart between which it is alive. If it is not freed, ``end`` is the
            last step.
        num_bytes: its size.
        owner: its owner, shown as its colour.
        module: its module; "" if unknown.
        what: operator, number format and shape.
        phase: phase in which it was allocated.
    """

    begin: int
    end: int
    num_bytes: int
    owner: str
    module: str
    what: str
    phase: str


@dataclass(frozen=True)
class Chart:
    """Memory over an iteration.

    Attributes:
        name: title of the chart.
        tensors: in the order of allocation.
        num_steps: number of allocations and frees. Each is one step to the right.
        phases: names, and the steps at which they start.
        context_bytes: memory of the process in addition to its tensors.
        total_bytes: device memory of the process, including the allocator's cache.
        left_out_bytes: peak of the tensors that are too small to be drawn.
    """

    name: str
    tensors: list[Tensor]
    num_steps: int
    phases: list[tuple[str, int]]
    context_bytes: int
    total_bytes: int
    left_out_bytes: int


@dataclass(frozen=True)
class Bar:
    """The effect of one knob.

    Attributes:
        name: name of the knob.
        tier: tier of the technique; "" for the job without changes.
        gb: device memory of the process with this knob.
        time: range of the predicted seconds per image, relative to the job without it, as text.
        settings: config keys and their values.
    """

    name: str
    tier: str
    gb: float
    time: str
    settings: str


@dataclass(frozen=True)
class Measured:
    """What a log has measured, beside what is predicted.

    Attributes:
        rows: a table with a header row.
        rises_gb: iterations, and the peak of allocated memory from there on. The last point is the
            last iteration.
        range_gb: predicted range of that peak; None if nothing is predicted.
        failed_gb: iteration and allocated memory, with what was asked for, of an out-of-memory
            error; None if there was none, or if its message does not say.
    """

    rows: list[list[str]]
    rises_gb: list[tuple[int, float]]
    range_gb: Optional[tuple[float, float]]
    failed_gb: Optional[tuple[int, float]]


@dataclass(frozen=True)
class Page:
    """The content of a page.

    Attributes:
        title: title of the page.
        answer: lines of which the first is the verdict.
        next_step: what to type.
        job_lines: lines about the job.
        charts: the job without changes, or before and after a plan.
        limits_gb: limits that are drawn as lines through charts and bars, by name. The smallest is
            the first.
        keys: config keys to copy, as YAML; "" if nothing changes.
        bars: bars of the knobs. The first is the job without changes.
        steps: the steps of a plan as a table with a header row; None without a plan.
        measured: what a log has measured; None without a log.
    """

    title: str
    answer: str
    next_step: str
    job_lines: list[str]
    charts: list[Chart]
    limits_gb: dict[str, float]
    keys: str = ""
    bars: Sequence[Bar] = ()
    steps: Optional[list[list[str]]] = None
    measured: Optional[Measured] = None


def write_page(page: Page, path: Path) -> None:
    """Write a page as HTML. Its texts are escaped, and it loads no other files."""
    data = {**asdict(page), "owners": _owners(page.charts)}
    # "<" ends the script that holds the data, if "/script>" follows.
    text = json.dumps(data).replace("<", "\\u003c")
    before, after = _TEMPLATE.read_text(encoding="utf-8").split("$DATA")
    with output_file(path) as f:
        f.write((before.replace("$TITLE", html.escape(page.title)) + text + after).encode())


def _owners(charts: list[Chart]) -> list[str]:
    """Owners in stacking order: long-lived ones below, short-lived ones on top."""
    num_bytes: Counter[str] = Counter()
    lives: dict[str, float] = defaultdict(float)
    for chart in charts:
        for t in chart.tensors:
            num_bytes[t.owner] += t.num_bytes
            lives[t.owner] += t.num_bytes * (t.end - t.begin) / max(chart.num_steps, 1)
    return sorted(lives, key=lambda owner: lives[owner] / num_bytes[owner], reverse=True)
