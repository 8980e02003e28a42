# Copyright (c) the d2_memfit developers.
"""Which room of the package may import which: a room is a folder, or a module in its root."""

import ast
from graphlib import CycleError, TopologicalSorter

import pytest
from tiny import ROOT

PACKAGE = ROOT / "d2_memfit"
DOORS = {"cli", "doctor", "measure"}


def modules(package):
    """Files of all modules; a folder's name stands for its __init__.py."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def room_of(file, package):
    return ".".join(file.relative_to(package).parent.parts) or file.stem


def imports(package):
    """File, module and name of all imports within the package, also in functions, but not those
    of a room's face.
    """
    files = modules(package)
    for file in files.values():
        if file.name == "__init__.py":
            continue
        folder = file.relative_to(package).parent.parts
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                start = folder[: len(folder) - node.level + 1]
                base = ".".join([*start, *filter(None, [node.module])])
                for alias in node.names:
                    full = f"{base}.{alias.name}".lstrip(".")
                    yield file, full if full in files else base, alias.name


def arrows(package):
    """Rooms that each room imports from."""
    files = modules(package)
    rooms = {room_of(file, package): set() for file in files.values()}
    for file, module, _ in imports(package):
        rooms[room_of(file, package)].add(room_of(files[module], package))
    return {room: others - {room} for room, others in rooms.items()}


def floors(rooms):
    """Rooms, each after those that it imports from: an error if there is a circle."""
    return list(TopologicalSorter(rooms).static_order())


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
    assert len(floors(ARROWS)) == len(ARROWS) > 10


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
    for file, imported, name in imports(PACKAGE):
        room, _, module = imported.rpartition(".")
        is_outside = room not in ("", room_of(file, PACKAGE)) and imported not in faces
        if is_outside and module != name and name in faces[room]:
            deep.append(f"{file.relative_to(PACKAGE)}: {imported}.{name}")
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
        floors(arrows(tmp_path))
