# Copyright (c) the d2_memfit developers.
"""The tables of docs/BENCHMARK.md and README.md's rows, from the lines of docs/benchmark.jsonl."""

import json
from pathlib import Path
from typing import Any

from pages import markdown_table, write_section


def write(root: Path) -> None:
    """Write the tables between their comments, and the rows of README over the rows before."""
    lines = (root / "docs" / "benchmark.jsonl").read_text().splitlines()
    sections = {line["section"]: line for line in map(json.loads, lines)}
    for name, line in sections.items():
        write_section(root / "docs" / "BENCHMARK.md", name, "benchmark.py peers", table(line))
    readme = root / "README.md"
    text = readme.read_text()
    for row in rows_of_readme({name: line["rows"] for name, line in sections.items()}):
        first, bar, _ = row.partition(" | ")
        text = "\n".join(row if x.startswith(first + bar) else x for x in text.split("\n"))
    readme.write_text(text)


def table(line: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in line["versions"].items())
    rows = line["rows"]
    return f"{line['date']}; {line['machine']}; {versions}.\n\n" + markdown_table(
        list(rows[0]), [list(row.values()) for row in rows]
    )


def rows_of_readme(sections: dict[str, list[dict[str, Any]]]) -> list[str]:
    survival = "when-a-batch-does-not-fit"
    cells = [
        (words, *fates(sections[name]), survival)
        for words, name in (
            ("a batch that does not fit, two ranks, with `MEMFIT.OOM.POLICY split`", "two_ranks"),
            ("the same, one rank", "one_rank"),
        )
    ]
    found = {row["side"]: row["DETR-like, 3 + 3 + 2"] for row in sections["gradients"]}
    peers = [side for side in found if side not in ("Detectron2", "d2_memfit")]
    others = ", ".join(f"{side} {found[side]}" for side in peers)
    what = "relative error of the gradients of a DETR-like model, in micro-batches of 3 + 3 + 2"
    cells.append((f"{what} images", found["d2_memfit"], others, "the-gradient-of-a-step"))
    return [
        f"| {what} | {own} | {others} | [race](docs/BENCHMARK.md#{anchor}) |"
        for what, own, others, anchor in cells
    ]


def fates(rows: list[dict[str, Any]]) -> tuple[str, str]:
    """What d2_memfit and the others did."""
    results: dict[str, list[str]] = {}
    for row in rows:
        if row["side"] == "d2_memfit, split":
            own = f"{row['result']}, {row['images in steps']} images"
        elif row["side"] != "d2_memfit":
            name = row["side"].partition(", ")[2] or row["side"]
            results.setdefault(row["result"], []).append(f"`{name}`" if "_" in name else name)
    return own, "; ".join(f"{result}: {', '.join(sides)}" for result, sides in results.items())
