#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Write the map of the package into docs/HOW_IT_WORKS.md: its rooms, floors and imports.

A room is a folder of the package, or a module in its root. A room stands one floor above the
highest room that it imports from, so imports run down, unless rooms import each other in a circle.
"""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "HOW_IT_WORKS.md"
BEGIN, END = "<!-- map -->", "<!-- end of map -->"


class Import(NamedTuple):
    file: Path
    room: str  # that imports
    module: str  # what is imported from, with dots, without d2_memfit
    name: str


def modules(package: Path) -> dict[str, Path]:
    """Files of all modules; a folder's name stands for its __init__.py."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(package: Path) -> Iterator[Import]:
    """All imports from the package itself, within functions too; not those of a room's face."""
    files = modules(package)
    for file in files.values():
        if file.name == "__init__.py":
            continue
        folder = file.relative_to(package).parent.parts
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                start = list(folder[: len(folder) - node.level + 1])
                base = ".".join(start + (node.module.split(".") if node.module else []))
                for alias in node.names:
                    full = f"{base}.{alias.name}".lstrip(".")
                    module = full if full in files else base
                    yield Import(file, room_of(file, package), module, alias.name)


def room_of(file: Path, package: Path) -> str:
    folder = ".".join(file.relative_to(package).parent.parts)
    return folder or file.stem


def arrows(package: Path) -> dict[str, set[str]]:
    """Rooms that each room imports from."""
    files = modules(package)
    rooms: dict[str, set[str]] = {room_of(f, package): set() for f in files.values()}
    for one in imports(package):
        other = room_of(files[one.module], package)
        if other != one.room:
            rooms[one.room].add(other)
    return rooms


def floors(package: Path) -> dict[str, int]:
    """Floor of each room.

    Raises:
        graphlib.CycleError: rooms import each other in a circle.
    """
    below = arrows(package)
    floor: dict[str, int] = {}
    for room in TopologicalSorter(below).static_order():
        floor[room] = max((floor[other] + 1 for other in below[room]), default=0)
    return floor


def table(package: Path) -> str:
    files, below, floor = modules(package), arrows(package), floors(package)
    rows = []
    for room in sorted(floor, key=lambda room: (-floor[room], room)):
        file = files.get(room, files[""])
        purpose = (ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()[0]
        link = f"[{room}](../{file.relative_to(ROOT)})"
        rows.append((floor[room], link, purpose))
    text: str = tabulate(rows, ["floor", "room", "what it is for"], "github")
    count = sum(map(len, below.values()))
    return f"{len(floor)} rooms on {max(floor.values()) + 1} floors, {count} arrows.\n\n{text}"


def page(text: str) -> str:
    """The page with its map made again."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(ROOT / 'd2_memfit')}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
