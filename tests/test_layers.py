# Copyright (c) the d2_memfit developers.
"""Which room of the package may import which."""

import ast
from graphlib import CycleError

import pytest
from make_map import PAGE, arrows, floors, imports, modules, page
from tiny import ROOT

PACKAGE = ROOT / "d2_memfit"
DOORS = {"cli", "doctor", "measure"}


def part(room):
    return room.partition(".")[0]


def below(room):
    """All rooms that a room needs, directly or not."""
    found, todo = set(), [room]
    while todo:
        for other in ARROWS[todo.pop()] - found:
            found.add(other)
            todo.append(other)
    return found


ARROWS = arrows(PACKAGE)


def test_imports_run_down():
    floors(PACKAGE)  # an error if there is a circle


def test_the_map_is_up_to_date():
    assert PAGE.read_text() == page(PAGE.read_text()), "run python tools/make_map.py"


@pytest.mark.parametrize(("one", "other"), [("engine", "planner"), ("planner", "engine")])
def test_neighbours_do_not_import_each_other(one, other):
    rooms = [room for room in ARROWS if part(room) == one]
    assert rooms
    assert not [room for room in rooms if other in map(part, below(room))]


def test_engine_and_planner_stand_on_the_job():
    assert "job" in below("engine") & below("planner")
    assert not {"engine", "planner"} & set(map(part, below("job")))


def test_nothing_imports_what_people_type():
    inner = [room for room in ARROWS if part(room) not in {*DOORS, "__main__"}]
    assert not [room for room in inner if DOORS & below(room)]


def test_rooms_with_a_face_are_entered_through_it():
    """What an __init__.py names is imported from there, and from nowhere deeper."""
    files = modules(PACKAGE)
    packages = {room: file for room, file in files.items() if file.name == "__init__.py"}
    faces = {room: names_of_face(file) for room, file in packages.items()}
    deep = []
    for one in imports(PACKAGE):
        room, _, module = one.module.rpartition(".")
        is_outside = room not in ("", one.room) and one.module not in faces
        if is_outside and module != one.name and one.name in faces[room]:
            deep.append(f"{one.file.relative_to(PACKAGE)}: {one.module}.{one.name}")
    assert not deep


def names_of_face(file):
    """The names in a module's ``__all__``, and those that it takes from other modules by ``*``."""
    names = []
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names += ast.literal_eval(node.value)
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            taken = names_of_face(file.parent / f"{node.module}.py")
            assert taken, f"{file} takes all names of {node.module}, which has no __all__"
            names += taken
    return names


def test_circles_and_imports_within_functions_are_seen(tmp_path):
    for folder in ("", "a", "b"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "__init__.py").write_text("")
    (tmp_path / "a" / "one.py").write_text("from ..b import two\n")
    (tmp_path / "b" / "two.py").write_text("def f():\n    from ..a.one import x\n")
    assert arrows(tmp_path) == {"__init__": set(), "a": {"b"}, "b": {"a"}}
    with pytest.raises(CycleError):
        floors(tmp_path)
