# Copyright (c) the d2_memfit developers.
"""Keeping PyTorch's compiler out of a process that compiles nothing: its import takes a second."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from types import ModuleType
from typing import Any, Optional

__all__ = ["without_dynamo"]

_NAME = "torch._dynamo"


@contextmanager
def without_dynamo() -> Iterator[None]:
    """While open, import ``torch._dynamo`` at its first use, not when it is named.

    torchvision names it at import, and PyTorch's optimizers and checkpoints when they run. They
    only ask whether something is being compiled. Use this only in processes that do not train:
    PyTorch would later compile functions that it marks in the meantime as not to be compiled.
    """
    if _NAME in sys.modules:
        yield
        return
    config = _StandIn(f"{_NAME}.config", error_on_nested_fx_trace=True)  # as it is
    known = {"disable": _disable, "graph_break": lambda: None, "is_compiling": lambda: False}
    stand_in = _StandIn(_NAME, config=config, **known)
    utils = _StandIn(f"{_NAME}.utils", is_compile_supported=_is_compile_supported)
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    sys.modules.update({_NAME: stand_in, utils.__name__: utils})
    try:
        yield
    finally:
        _remove_stand_ins()
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


class _StandIn(ModuleType):
    """A module that knows a few names, and becomes the real one when others are requested."""

    def __init__(self, name: str, **known: Any) -> None:
        super().__init__(name)
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if name == "__path__" and self.__name__ == _NAME:  # requested by the import of a submodule
            return _folders()
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__} has no attribute {name}")
        return getattr(_real(self.__name__), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_real(self.__name__), name, value)


class _Finder(MetaPathFinder):
    """Imports the real package before one of its submodules."""

    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Any = None
    ) -> Optional[ModuleSpec]:
        if not name.startswith(f"{_NAME}.") or not isinstance(sys.modules.get(_NAME), _StandIn):
            return None
        try:
            return spec_from_loader(name, _AsItIs(_real(name)))
        except ModuleNotFoundError:
            return None


class _AsItIs(Loader):
    """Loads a module that exists already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _real(name: str) -> ModuleType:
    _remove_stand_ins()
    import_module(_NAME)
    return import_module(name)


def _remove_stand_ins() -> None:
    for name in (_NAME, f"{_NAME}.utils"):
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]


def _folders() -> list[str]:
    torch = find_spec("torch")
    assert torch is not None
    return [f"{folder}/_dynamo" for folder in torch.submodule_search_locations or ()]


def _disable(
    fn: Optional[Callable[..., Any]] = None, recursive: bool = True, **options: Any
) -> Callable[..., Any]:
    return fn if fn is not None else lambda function: function


def _is_compile_supported(device_type: str) -> Any:
    return _real(f"{_NAME}.utils").is_compile_supported(device_type)
