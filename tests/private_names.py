# Copyright (c) the d2_memfit developers.
"""Private names of libraries: whether they are still there, and which of them a file uses."""

import ast
import inspect
import re
from importlib import import_module

from tiny import ROOT

PACKAGE = ROOT / "d2_memfit"

_TITLES = {"torch": "PyTorch", "detectron2": "Detectron2", "fvcore": "fvcore"}

# Named tuples' methods, a LazyConfig's key, and Python's own, which are documented.
_NOT_PRIVATE = {"_replace", "_asdict", "_make", "_target_", "_exit", "_getframe", "_paramsEval"}


def last_seen(library):
    """The newest release in which all names were found: the one that this suite is run with."""
    if library == "detectron2":
        return "v0.6, and main at 02b5c4e2"
    pins = (ROOT / "requirements" / "dev.txt").read_text()
    return re.search(rf"^{library}==([\w.]+)", pins, re.MULTILINE)[1]


def moved(name, arguments):
    """What is wrong with a private name, or "".

    Args:
        name: dotted, from its library on.
        arguments: with which it is called; None if it is not, or if it says no signature.
    """
    try:
        place = _find(name)
    except (ImportError, AttributeError) as e:
        return _complaint(name, f"is not there: {e}")
    if arguments is not None:
        try:
            inspect.signature(place).bind(*arguments)
        except TypeError as e:
            return _complaint(name, f"takes no {arguments}: {e}")
    return ""


def missing(name, attributes):
    """Which private attributes neither a class nor its objects have, or ""."""
    text = moved(name, None)
    if text:
        return text
    cls = _find(name)
    gone = [a for a in attributes if not hasattr(cls, a) and a not in inspect.getsource(cls)]
    return _complaint(name, f"has no {', '.join(gone)}") if gone else ""


def _find(name):
    """What a dotted name stands for: as much of it as there is is a module, then attributes."""
    parts = name.split(".")
    place = import_module(parts[0])
    for i, part in enumerate(parts[1:], 1):
        if not hasattr(place, part) and inspect.ismodule(place) and hasattr(place, "__path__"):
            import_module(".".join(parts[: i + 1]))
        place = getattr(place, part)
    return place


def _complaint(name, what):
    library = name.partition(".")[0]
    title, release = _TITLES[library], import_module(library).__version__
    return (
        f"{name}, which d2_memfit uses, {what}. This is {title} {release}. It was last seen in "
        f"{title} {last_seen(library)}"
    )


def names_in(names, attributes):
    """Private parts of names, and private attributes."""
    parts = {part for name in [*names, *attributes] for part in name.split(".")}
    return {p for p in parts if _is_private(p)} | {a for some in attributes.values() for a in some}


def private_names(file, library):
    """Private names of a library that a file imports, and private attributes that it uses of
    anything but ``self``.
    """
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == library:
            names.update(node.module.split("."), (alias.name for alias in node.names))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                names.update(parts if parts[0] == library else ())
        elif isinstance(node, ast.Attribute) and not _is_of_ours(node.value):
            names.add(node.attr)
    return {n for n in names if _is_private(n)} - {"_C"}


def own_names(folder):
    """Names that a folder's files give to something."""
    names = set()
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and _is_of_ours(node.value):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def _is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in _NOT_PRIVATE


def _is_of_ours(value):
    """Whether an attribute of it is one of the class that the code is in, or of its bases."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")
