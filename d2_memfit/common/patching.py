# Copyright (c) the d2_memfit developers.
"""Temporary replacement of functions in the files that know them by name."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import CodeType, FunctionType
from typing import Any, Callable

from torch import nn

__all__ = ["File", "Groups", "files_of_classes", "has_name", "knows_function", "modules_with"]
__all__ += ["replaced_functions", "replaced_together", "source_files"]

# Files, and by name a function that makes the new function from the original.
Groups = Iterable[tuple[Iterable[Any], Mapping[str, Callable[[Any], Any]]]]


def source_files(modules: Iterable[nn.Module]) -> list[Any]:
    """The files that define the classes of modules, and the bases of these classes.

    Each has the names in its file as attributes, like a Python module.
    """
    return files_of_classes(c for module in modules for c in type(module).__mro__)


def files_of_classes(classes: Iterable[type]) -> list[Any]:
    """The files that define classes, as in :func:`source_files`."""
    files = [file for file in map(_file_of, set(classes)) if file is not None]
    return list({id(vars(file)): file for file in files}.values())


def _file_of(cls: type) -> Any:
    # A file that was loaded by its path is not in sys.modules. Only its functions refer to it.
    # A LazyConfig has no name, and its classes are builtins, or of no file.
    name = getattr(cls, "__module__", "builtins")
    for value in vars(cls).values():
        if not isinstance(value, FunctionType):
            continue
        if value.__globals__.get("__name__", "builtins") == name:
            return File(value.__globals__)
    return sys.modules.get(name)


class File:
    """Names of a file, as attributes."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


def has_name(code: CodeType, name: str) -> bool:
    """Whether the code of a function uses this name."""
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]  # comprehensions, for one
    return name in code.co_names or any(has_name(c, name) for c in inner)


def replaced_functions(
    files: Iterable[Any], replacements: Mapping[str, Callable[[Any], Any]]
) -> AbstractContextManager[None]:
    """While open, replace functions in the files that know them by name.

    Args:
        files: Python modules, classes, or the result of :func:`source_files`.
        replacements: by name, a function that makes the new function from the original.

    Raises:
        LookupError: no file knows a name, so nothing would be replaced.
    """
    return replaced_together([(files, replacements)])


@contextmanager
def replaced_together(groups: Groups) -> Iterator[None]:
    """While open, replace the functions of all groups, as :func:`replaced_functions` does."""
    entries = []
    try:
        for given, replacements in groups:
            files = list(given)
            for name in replacements:
                if not knows_function(files, name):
                    raise LookupError(f"there is no function {name} to be replaced in {files}")
            found = [(f, n, getattr(f, n)) for f in files for n in replacements if hasattr(f, n)]
            for file, name, original in found:
                # A class stores some methods in another form than getattr returns, such as a
                # classmethod, or a method of C++.
                entries.append((file, name, vars(file).get(name, original)))
            for file, name, original in found:
                setattr(file, name, replacements[name](original))
        yield
    finally:
        for file, name, entry in reversed(entries):
            setattr(file, name, entry)


def modules_with(name: str) -> list[tuple[Any, Any]]:
    """The Python modules that know a name, and its value there. Nothing is imported for it."""
    found = [(m, getattr(m, "__dict__", {}).get(name)) for m in list(sys.modules.values())]
    return [(module, value) for module, value in found if value is not None]


def knows_function(files: Iterable[Any], name: str) -> bool:
    """Whether one of the files knows a function by this name."""
    return any(hasattr(file, name) for file in files)
