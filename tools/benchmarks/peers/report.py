# Copyright (c) the d2_memfit developers.
"""The tables of docs/BENCHMARK.md, from the lines of docs/benchmark.jsonl."""

import json
from pathlib import Path
from typing import Any

from pages import markdown_table, write_section


def write(root: Path) -> None:
    """Write the tables between their comments."""
    lines = (root / "docs" / "benchmark.jsonl").read_text().splitlines()
    sections = {line["section"]: line for line in map(json.loads, lines)}
    for name, line in sections.items():
        write_section(root / "docs" / "BENCHMARK.md", name, "benchmark.py peers", table(line))


def table(line: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in line["versions"].items())
    rows = line["rows"]
    return f"{line['date']}; {line['machine']}; {versions}.\n\n" + markdown_table(
        list(rows[0]), [list(row.values()) for row in rows]
    )
