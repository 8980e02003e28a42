"""Modules that a project imports and that are not there, because the small job needs none of it."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any, Optional
from unittest.mock import MagicMock

__all__ = ["install_stubs"]


def install_stubs(names: Iterable[str]) -> None:
    """Let these modules, and all below them, be imported. What is taken from them is a
    mock: classes can be derived from, functions raise NotImplementedError.
    """
    sys.meta_path.insert(0, _StubFinder(tuple(names)))


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Any = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if not any(name == stub or name.startswith(f"{stub}.") for stub in self._names):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Stub(types.ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        # A class, so that it can be a base class and a type in annotations too.
        value = type(name, (MagicMock,), {}) if name[0].isupper() else _Missing(name)
        setattr(self, name, value)
        return value


class _Missing:
    """Raises when it is called: some projects have another way where the compiled one fails.

    It is not a mock, for that would keep the tensors that it is called with.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "_Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} is a stub")
