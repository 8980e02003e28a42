"""Finding modules by patterns of their names, and changing what one of them does."""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from inspect import unwrap
from types import CodeType, FunctionType
from typing import Any, Callable

from torch import nn

from ..checks import near
from ..errors import ConfigError

__all__ = [
    "calls_function",
    "extend",
    "find_modules",
    "knows_function",
    "own_class",
    "replaced_functions",
    "source_files",
]


def find_modules(model: nn.Module, key: str, patterns: Sequence[str]) -> list[nn.Module]:
    """The modules whose names match one of the patterns, as in ``fnmatch``.

    What is inside of a module that matches is not listed again: "backbone.bottom_up.res4.*" gives
    the blocks of res4. Of a ``ModuleList`` or ``ModuleDict``, which is never called, the modules in
    it are given.

    Args:
        key: the config key that has the patterns, for messages.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"{key}: no module of the model matches {pattern!r}"
                f"{near(pattern, names, cutoff=0.4)}"
            )
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not is_inside and any(fnmatchcase(name, pattern) for pattern in patterns):
            found[name] = module
    return [m for module in found.values() for m in _callable_modules(module)]


def _callable_modules(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child in module.children():
            yield from _callable_modules(child)
    else:
        yield module


def extend(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Give one module a class that derives from ``mixin`` and its own class.

    Its parameters keep their names, it is still an instance of its own class, and copies of it are
    extended too.

    Args:
        attributes: of the new class, for the mixin's methods.
    """
    original, base = type(module), own_class(module)
    extensions = [*getattr(original, "_extensions", []), (mixin, attributes)]

    def reduce(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        return _extended, (base, extensions), vars(self)

    members = {
        **attributes,
        "__module__": original.__module__,
        "__reduce_ex__": reduce,
        "_extended_class": base,
        "_extensions": extensions,
    }
    module.__class__ = type(original.__name__, (mixin, original), members)


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module had before :func:`extend`."""
    own: type[nn.Module] = getattr(type(module), "_extended_class", type(module))
    return own


def _extended(base: type[nn.Module], extensions: list[tuple[type, dict[str, Any]]]) -> nn.Module:
    """For copies and pickles."""
    module = base.__new__(base)
    for mixin, attributes in extensions:
        extend(module, mixin, **attributes)
    return module


def source_files(modules: Iterable[nn.Module]) -> list[Any]:
    """The files that the modules' classes and their bases are from. What is known in one by a name
    is its attribute, as of a Python module.
    """
    classes = {c for module in modules for c in type(module).__mro__}
    files = [file for file in map(_file_of, classes) if file is not None]
    return list({id(vars(file)): file for file in files}.values())


def _file_of(cls: type) -> Any:
    # A file that was loaded by its path is not in sys.modules, and known to its functions only.
    for value in vars(cls).values():
        if isinstance(value, FunctionType) and value.__globals__["__name__"] == cls.__module__:
            return _File(value.__globals__)
    return sys.modules.get(cls.__module__)


class _File:
    def __init__(self, names: dict[str, Any]) -> None:
        self.__dict__ = names


def calls_function(cls: type, name: str) -> bool:
    """Whether a method of the class, or of its bases, uses something of this name."""
    methods = [method for base in cls.__mro__ for method in vars(base).values()]
    return any(
        isinstance(method, FunctionType) and _has_name(unwrap(method).__code__, name)
        for method in methods
    )


def _has_name(code: CodeType, name: str) -> bool:
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]  # comprehensions, for one
    return name in code.co_names or any(_has_name(c, name) for c in inner)


@contextmanager
def replaced_functions(
    files: Iterable[Any],
    replacements: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]],
) -> Iterator[None]:
    """While open, functions that are known in some files by a name are others there.

    Args:
        files: Python modules, classes, or what :func:`source_files` gives.
        replacements: for each name what makes the new function out of the original.

    Raises:
        LookupError: a name is known in none of the files, so nothing would be replaced.
    """
    files = list(files)
    for name in replacements:
        if not knows_function(files, name):
            raise LookupError(f"there is no function {name} to be replaced in {files}")
    originals = [(f, n, getattr(f, n)) for f in files for n in replacements if hasattr(f, n)]
    for file, name, original in originals:
        setattr(file, name, replacements[name](original))
    try:
        yield
    finally:
        for file, name, original in originals:
            setattr(file, name, original)


def knows_function(files: Iterable[Any], name: str) -> bool:
    """Whether one of the files knows a function by this name."""
    return any(hasattr(file, name) for file in files)
