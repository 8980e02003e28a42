"""Which package may import which."""

import ast

import pytest
from tiny import ROOT

PACKAGE = ROOT / "d2_memfit"
LOWER_FLOORS = ("memory", "techniques")


def imported_packages(folder):
    """Names of the packages of d2_memfit that the modules in a folder import."""
    names = set()
    for file in (PACKAGE / folder).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 2:
                modules = [node.module] if node.module else [a.name for a in node.names]
                names |= {module.split(".")[0] for module in modules}
    return names


@pytest.mark.parametrize(("one", "other"), [("engine", "planner"), ("planner", "engine")])
def test_neighbours_do_not_import_each_other(one, other):
    assert other not in imported_packages(one)


@pytest.mark.parametrize("folder", LOWER_FLOORS)
def test_lower_floors_import_nothing_above_them(folder):
    assert not {"engine", "planner"} & imported_packages(folder)


def test_imports_are_seen():
    assert {"memory", "techniques"} <= imported_packages("engine")
