# Copyright (c) the d2_memfit developers.
"""Which package may import which."""

import ast

import pytest
from tiny import ROOT

PACKAGE = ROOT / "d2_memfit"
UPPER = {"engine", "planner"}
DOORS = {"cli", "doctor", "job_options", "measure", "train"}
GROUND = [
    *("memory", "techniques", "report", "data"),
    *("model_zoo", "config.py", "config_keys.py", "cost_model.py"),
    *("geometry.py", "patching.py", "precision.py", "presets.py", "random_state.py", "scaling.py"),
]


def imported_modules(place):
    """Modules and packages right under d2_memfit that a file, or the files of a folder, import."""
    path = PACKAGE / place
    names = set()
    for file in path.rglob("*.py") if path.is_dir() else [path]:
        package = file.relative_to(PACKAGE.parent).parts[:-1]
        for node in ast.walk(ast.parse(file.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                start = package[: len(package) - node.level + 1] if node.level else ()
                module = ".".join([*start, *([node.module] if node.module else [])])
                modules = [f"{module}.{alias.name}" for alias in node.names]
            parts = [module.split(".") for module in modules]
            names |= {part[1] for part in parts if part[0] == "d2_memfit" and len(part) > 1}
    return names


@pytest.mark.parametrize(("one", "other"), [("engine", "planner"), ("planner", "engine")])
def test_neighbours_do_not_import_each_other(one, other):
    assert other not in imported_modules(one)


@pytest.mark.parametrize("place", GROUND)
def test_the_ground_floor_imports_nothing_above_it(place):
    assert not {"job", *UPPER, *DOORS} & imported_modules(place)


def test_the_job_stands_between_the_floors():
    assert not (UPPER | DOORS) & imported_modules("job")
    assert all("job" in imported_modules(place) for place in UPPER)


@pytest.mark.parametrize("place", sorted(UPPER))
def test_nothing_but_doors_imports_doors(place):
    assert not DOORS & imported_modules(place)


def test_imports_are_seen_relative_and_absolute(tmp_path, monkeypatch):
    assert {"memory", "techniques", "compat"} <= imported_modules("engine")
    package = tmp_path / "d2_memfit"
    (package / "engine").mkdir(parents=True)
    (package / "engine" / "a.py").write_text(
        "import d2_memfit.planner\nfrom d2_memfit import cli\nfrom .. import job\n"
        "from ..measure import jobs\nfrom . import own\n"
    )
    monkeypatch.setitem(globals(), "PACKAGE", package)
    assert imported_modules("engine") - {"engine"} == {"planner", "cli", "job", "measure"}
