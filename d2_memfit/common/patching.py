# Copyright (c) the d2_memfit developers.
"""Temporary replacement of functions in the files that know them by name."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, Callable
from unittest.mock import patch

from torch import nn

__all__ = ["File", "Group", "files_of_classes", "modules_with", "replaced_functions"]
__all__ += ["source_files"]

# Files, such as Python modules, classes, or the result of source_files; and by name a function that
# makes the new function from the original.
Group = tuple[Iterable[Any], Mapping[str, Callable[[Any], Any]]]


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


@contextmanager
def replaced_functions(*groups: Group) -> Iterator[None]:
    """While open, replace the functions of each group in those of its files that know them."""
    with ExitStack() as stack:
        for files, replacements in groups:
            found = [(f, n, getattr(f, n)) for f in files for n in replacements if hasattr(f, n)]
            for file, name, original in found:
                stack.enter_context(patch.object(file, name, replacements[name](original)))
        yield


def modules_with(name: str) -> list[tuple[Any, Any]]:
    """The Python modules that know a name, and its value there. Nothing is imported for it."""
    found = [(m, getattr(m, "__dict__", {}).get(name)) for m in list(sys.modules.values())]
    return [(module, value) for module, value in found if value is not None]
