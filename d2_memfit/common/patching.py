# Copyright (c) the d2_memfit developers.
"""Temporary replacement of functions in the files that know them by name."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Callable
from unittest.mock import patch

from torch import nn

__all__ = ["Group", "files_of_classes", "modules_with", "replaced_functions", "source_files"]
__all__ += ["with_original"]

# Files, such as Python modules, classes, or the result of source_files; and by name a function that
# makes the new function from the original.
Group = tuple[Iterable[Any], Mapping[str, Callable[[Any], Any]]]


def source_files(modules: Iterable[nn.Module]) -> list[Any]:
    """The files that define the classes of modules, and the bases of these classes."""
    return files_of_classes(c for module in modules for c in type(module).__mro__)


def files_of_classes(classes: Iterable[type]) -> list[Any]:
    """The files that define classes, as in :func:`source_files`."""
    # A file that was loaded by its path may not be in sys.modules. A LazyConfig has no name.
    names = {getattr(cls, "__module__", None) for cls in classes}
    return [sys.modules[name] for name in names if name in sys.modules]


@contextmanager
def replaced_functions(*groups: Group) -> Iterator[None]:
    """While open, replace the functions of each group in those of its files that know them."""
    with ExitStack() as stack:
        for files, replacements in groups:
            found = [(f, n, getattr(f, n)) for f in files for n in replacements if hasattr(f, n)]
            for file, name, original in found:
                stack.enter_context(patch.object(file, name, replacements[name](original)))
        yield


def with_original(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Make a :data:`Group`'s function from one that gets the original, then the arguments.

    In place of ``nms``, ``with_original(lambda nms, boxes: nms(2 * boxes))`` takes ``boxes`` alone.
    """
    return lambda original: wraps(original)(lambda *args, **kw: function(original, *args, **kw))


def modules_with(name: str) -> list[tuple[Any, Any]]:
    """The Python modules that know a name, and its value there. Nothing is imported for it."""
    loaded = list(sys.modules.values())
    found = [m for m in loaded if getattr(m, "__dict__", {}).get(name) is not None]
    return [(module, vars(module)[name]) for module in found]
