# Copyright (c) the d2_memfit developers.
"""The page docs/BENCHMARK.md, its figure and its data, from the results of a race."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

from ..common import markdown_table
from . import effective_gradients
from .results import Results
from .sides import EVERY
from .speed import ONE_IMAGE
from .survival import NUM_IMAGES

DOCS = Path(__file__).resolve().parents[3] / "docs"
NOT_MEASURED = "Not measured yet."
TEMPLATE = Path(__file__).with_name("BENCHMARK.template.txt")
NAMES = {
    "accelerate": "Accelerate",
    "composer": "Composer",
    "d2_memfit": "d2_memfit",
    "detectron2": "Detectron2",
    "lightning": "Lightning",
    "mmengine": "mmengine",
}


def write_report(results: Results, docs: Path = DOCS) -> None:
    """Write BENCHMARK.md, benchmark.png and benchmark.jsonl to the folder."""
    (docs / "BENCHMARK.md").write_text(report(results))
    draw(results, docs / "benchmark.png")
    if results.path.resolve() != (docs / "benchmark.jsonl").resolve():
        shutil.copyfile(results.path, docs / "benchmark.jsonl")


def report(results: Results) -> str:
    machine = results.find("machine")
    if machine is None:
        raise ValueError(f"{results.path} has no results")
    versions = ", ".join(f"{NAMES[k]} {v}" for k, v in machine["versions"].items())
    return TEMPLATE.read_text().format(
        machine=machine["machine"],
        versions=versions,
        settings=machine["settings"],
        time_limit=time_limits(results),
        **{section: table(results) for section, table in TABLES.items()},
    )


def times(results: Results) -> str:
    lines = results.times()
    if not lines:
        return NOT_MEASURED
    base = next((x for x in lines if x["side"] == ONE_IMAGE), lines[0])["seconds_per_image"]
    rows = [
        [
            line["side"],
            f"{line['seconds_per_image']:.3f}",
            f"{line['best']:.3f}",
            f"{line['seconds_per_image'] / base:.3f}",
        ]
        for line in in_order(lines)
    ]
    header = ["", "s per image (median)", "s per image (best)", "ratio of medians"]
    return markdown_table(header, rows)


def memory(results: Results) -> str:
    rows = [[line["side"], line["peak_mib"]] for line in in_order(results.of("memory"))]
    header = ["", "peak of activations, gradients and optimizer state, MiB"]
    return markdown_table(header, rows) if rows else NOT_MEASURED


def gradients(results: Results) -> str:
    measured = {line["model"] for line in results.of("gradients")}
    columns = [
        (model, case.name)
        for model in effective_gradients.MODELS
        if model in measured
        for case in effective_gradients.CASES
    ]
    rows = []
    for side in effective_gradients.SIDES:
        lines = [
            results.find("gradients", side=side.name, model=model, case=case)
            for model, case in columns
        ]
        if any(lines):
            rows.append([side.name, *(line["outcome"] if line else "" for line in lines)])
    header = ["", *(f"{model.split(',')[0]}: {case}" for model, case in columns)]
    return markdown_table(header, rows) if rows else NOT_MEASURED


def survival(results: Results) -> str:
    tables = []
    for ranks, words in ((1, "one rank"), (2, "two ranks")):
        lines = in_order(line for line in results.of("survival") if line["ranks"] == ranks)
        rows = [[line["side"], *fate(line)] for line in lines]
        header = [words, "ends", "images behind steps", "weights' error", "error"]
        tables.append(markdown_table(header, rows) if rows else f"{words}: {NOT_MEASURED}")
    return "\n\n".join(tables)


def shortened(error: str) -> str:
    """Shorten an error; PyTorch's allocator adds its source line and a number of bytes."""
    wanted = "DefaultCPUAllocator: can't allocate memory"
    return wanted if wanted in error else error[:120]


def time_limits(results: Results) -> str:
    limits = sorted({line["time_limit_s"] for line in results.of("survival")})
    return " or ".join(f"{limit:g} s" for limit in limits) or "its limit"


def fate(line: dict[str, Any]) -> list[str]:
    end = line["end"]
    if line["restarts"]:
        end += f", began anew {line['restarts']} x" if line["restarts"] > 1 else ", began anew"
    weights = "" if line["weights_error"] is None else f"{line['weights_error']:.1e}"
    error = f"`{shortened(line['error'])}`" if line["error"] else ""
    images = " + ".join(map(str, line["images"]))
    return [end, f"{images} of {NUM_IMAGES * line['ranks']}", weights, error.replace("|", "\\|")]


def budgets(results: Results) -> str:
    rows = []
    for line in in_order(results.of("budget")):
        probes = [p for p in results.of("probe") if p["side"] == line["side"]]
        before = max(probe["data_gb"] for probe in probes)
        enough = line["enough_gb"]
        rows.append(
            [
                line["side"],
                f"{enough:.2f}" if enough else "more than the machine has",
                f"{line['too_small_gb']:.2f}",
                f"{before:.2f}",
                f"{enough - before:.2f}" if enough else "",
            ]
        )
    header = [
        "",
        "enough, GB",
        "not enough, GB",
        "before training, GB",
        "enough on top of that, GB",
    ]
    return markdown_table(header, rows) if rows else NOT_MEASURED


def in_order(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort lines in the order of the sides, whatever was measured first."""
    names = [side.name for side in EVERY]

    def place(line: dict[str, Any]) -> int:
        # A table may call a side by its name and how it takes the images.
        return max(i for i, name in enumerate(names) if line["side"].startswith(name))

    return sorted(lines, key=place)


TABLES = {
    "time": times,
    "memory": memory,
    "gradients": gradients,
    "survival": survival,
    "budget": budgets,
}


OURS, OTHERS = "#0072B2", "#999999"  # Okabe and Ito: told apart by colour-blind people


def draw(results: Results, path: Path) -> None:
    """Draw bars of survival of a large batch, smallest budget, tensor memory, and time."""
    survivors = [line for line in results.of("survival") if line["ranks"] == 1]
    panels = [
        (survivors, "images", f"images behind steps, of {NUM_IMAGES}, where a batch does not fit"),
        (
            results.of("budget"),
            "enough_gb",
            "smallest budget, GB: 16 images of 800 x 1088",
        ),
        (results.of("memory"), "peak_mib", "peak of tensors, MiB: 8 images of 480 x 640"),
        (results.times(), "seconds_per_image", "s per image, the same"),
    ]
    of_panels = [(in_order(lines), key, label) for lines, key, label in panels]
    of_panels = [panel for panel in of_panels if panel[0]]
    if not of_panels:
        return
    matplotlib.use("Agg")
    num_rows = -(-len(of_panels) // 2)
    figure, axes = pyplot.subplots(
        num_rows, 2, figsize=(13, 3.6 * num_rows), layout="constrained", squeeze=False
    )
    for ax in axes.flat[len(of_panels) :]:
        ax.remove()
    for ax, (lines, key, label) in zip(axes.flat, of_panels):
        values = [sum(line[key]) if key == "images" else line[key] or 0 for line in lines]
        bars = ax.barh([line["side"] for line in lines], values)
        for bar, line, value in zip(bars, lines, values):
            bar.set_color(OURS if line["side"].startswith("d2_memfit") else OTHERS)
            what = fate(line)[0] if key == "images" else f"{value:.4g}" if value else "none"
            middle = bar.get_y() + bar.get_height() / 2
            ax.text(value, middle, f" {what}", va="center", fontsize=9)
        ax.margins(x=0.5 if key == "images" else 0.15)
        ax.invert_yaxis()
        ax.set_xlabel(label)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)
