# Copyright (c) the d2_memfit developers.
"""A few names in place of torch._dynamo, until something else of it is used.

torchvision, checkpointing and each optimizer import it, 1.6 CPU seconds, for these alone.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

__all__ = ["import_dynamo_later"]

_FUNCTIONS: dict[str, dict[str, Any]] = {
    "torch._dynamo": {
        "disable": lambda function, *args, **kwargs: function,
        "graph_break": lambda *args: None,
    },
    "torch._dynamo.config": {"error_on_nested_fx_trace": True},
    "torch._dynamo.utils": {"is_compile_supported": lambda device_type: False},
}


class _Later(ModuleType):
    """A module that is imported when a name is asked for that it does not have."""

    def __getattr__(self, name: str) -> Any:
        is_path = name == "__path__" and self.__name__ == "torch._dynamo"  # to import its modules
        if name.startswith("__") and not is_path:
            raise AttributeError(name)
        for module in _FUNCTIONS:
            if isinstance(sys.modules.get(module), _Later):
                del sys.modules[module]
        return getattr(importlib.import_module(self.__name__), name)


def import_dynamo_later() -> None:
    """Call this before PyTorch is imported, in a process that compiles nothing by itself."""
    for name, functions in _FUNCTIONS.items():
        if name not in sys.modules:
            module = sys.modules[name] = _Later(name)
            vars(module).update(functions)
    vars(sys.modules["torch._dynamo"]).setdefault("config", sys.modules["torch._dynamo.config"])
