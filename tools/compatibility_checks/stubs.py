# Copyright (c) the d2_memfit developers.
"""Stand-ins for modules that a project imports and the small job does not use."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any, Optional
from unittest.mock import MagicMock

__all__ = ["install_stubs"]


def install_stubs(names: Iterable[str]) -> None:
    """Make these modules, and all below them, importable.

    Their content is mocked: classes can be derived from, functions raise NotImplementedError.
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
    """Raises when called: some projects have another way if the compiled one fails.

    It is not a mock, because a mock would keep the tensors of its calls.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "_Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} is a stub")
