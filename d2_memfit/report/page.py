"""A step's memory as one page that needs no network: who has it, tensor by tensor."""

import html
import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from ..files import whole_file

__all__ = ["Bar", "Chart", "Page", "Tensor", "write_page"]

_TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Tensor:
    """A rectangle of a chart.

    Attributes:
        begin, end: steps of the chart between which it is alive; the last step where it stays.
        num_bytes: of it.
        owner: by which it is coloured.
        module: whose it is; "" where that is not known.
        what: operator, number format and shape.
        phase: in which it was allocated.
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
        name: for people.
        tensors: in the order in which they are allocated.
        num_steps: allocations and frees, each one step to the right.
        phases: names, and the steps at which they begin.
        context_bytes: of the process beside its tensors.
        total_bytes: that the process takes of the device, with what the allocator holds ready.
        left_out_bytes: the most that tensors have together which are too small to be drawn.
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
    """What one knob does.

    Attributes:
        name: of the knob.
        tier: of the technique; "" for the job as it is.
        gb: that the process takes of the device with it.
        time_factor: seconds of an image with it, divided by those without; a prediction.
        settings: config keys and their values.
    """

    name: str
    tier: str
    gb: float
    time_factor: float
    settings: str


@dataclass(frozen=True)
class Page:
    """
    Attributes:
        title: of the page.
        facts: lines about the job.
        charts: the job as it is, or before and after a plan.
        limits_gb: lines that go through charts and bars, by name.
        bars: of the knobs, the job as it is first.
        steps: of a plan, as a table whose first row is its header; None without one.
    """

    title: str
    facts: list[str]
    charts: list[Chart]
    limits_gb: dict[str, float]
    bars: list[Bar]
    steps: Optional[list[list[str]]] = None


def write_page(page: Page, path: Path) -> None:
    """Write it as HTML. Nothing that it shows is taken for markup, and nothing is loaded."""
    owners = _owners(page.charts)
    data = asdict(page)
    for chart, of_page in zip(data["charts"], page.charts):
        chart["tensors"] = [_row(t, owners) for t in of_page.tensors]
    # "<" ends the script that holds the data, if "/script>" follows.
    text = json.dumps({**data, "owners": owners}).replace("<", "\\u003c")
    before, after = _TEMPLATE.read_text(encoding="utf-8").split("$DATA")
    with whole_file(str(path)) as f:
        f.write((before.replace("$TITLE", html.escape(page.title)) + text + after).encode())


def _owners(charts: list[Chart]) -> list[str]:
    """As they are stacked: what stays below, what comes and goes on top."""
    num_bytes: Counter[str] = Counter()
    lives: dict[str, float] = defaultdict(float)
    for chart in charts:
        for t in chart.tensors:
            num_bytes[t.owner] += t.num_bytes
            lives[t.owner] += t.num_bytes * (t.end - t.begin) / max(chart.num_steps, 1)
    return sorted(lives, key=lambda owner: lives[owner] / num_bytes[owner], reverse=True)


def _row(t: Tensor, owners: list[str]) -> list[Any]:
    """A page has thousands of them, so that their names are left out."""
    return [t.begin, t.end, t.num_bytes, owners.index(t.owner), t.module, t.what, t.phase]
