# Copyright (c) the d2_memfit developers.
"""Which room of the package may import which: a room is a folder, or a module in its root."""

import ast

from tiny import ROOT

PACKAGE = ROOT / "d2_memfit"
# From the top down: a room imports only from rooms below it.
ROOMS = (
    *("cli", "measure", "doctor", "testing", "predict", "explain", "report", "planner", "engine"),
    *("job", "config", "techniques", "data", "memory", "common"),
)
MOST_ARROWS = 70


def arrows(package):
    """Pairs of a room and another one that it imports from, also within functions.

    The package's own __init__.py and __main__.py are no rooms.
    """
    found = set()
    for file in package.rglob("*.py"):
        path = file.relative_to(package).with_suffix("").parts
        if path[0].startswith("__"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == len(path):
                names = [node.module] if node.module else [alias.name for alias in node.names]
                found |= {(path[0], name.partition(".")[0]) for name in names}
    return {pair for pair in found if len({*pair}) == 2 and not pair[1].startswith("__")}


ARROWS = arrows(PACKAGE)


def test_imports_run_down():
    names = {file.stem for file in PACKAGE.iterdir() if file.suffix == ".py" or file.is_dir()}
    assert {name for name in names if not name.startswith("__")} == {*ROOMS}
    assert not [pair for pair in ARROWS if ROOMS.index(pair[0]) > ROOMS.index(pair[1])]
    assert len(ARROWS) <= MOST_ARROWS


def test_the_planner_and_the_engine_stand_beside_each_other():
    assert ("planner", "engine") not in ARROWS
