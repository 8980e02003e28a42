# Copyright (c) the d2_memfit developers.
"""What happens before PyTorch is imported: a look at the environment, silence, and speed.

Standard library only.
"""

import importlib
import importlib.metadata
import importlib.util
import logging
import platform
import sys
import warnings
from types import ModuleType
from typing import Any, Optional

__all__ = ["ignore_warnings_of_libraries", "import_dynamo_later", "missing"]

_WITH_COMPILER = (
    "pip install 'setuptools<82' wheel ninja && pip install --no-build-isolation "
    "'git+https://github.com/facebookresearch/detectron2.git'"
)
# A few names in place of torch._dynamo, until something else of it is used: torchvision,
# checkpointing and each optimizer import it, 1.6 CPU seconds, for these alone.
_FUNCTIONS: dict[str, dict[str, Any]] = {
    "torch._dynamo": {
        "disable": lambda function, *args, **kwargs: function,
        "graph_break": lambda *args: None,
    },
    "torch._dynamo.config": {"error_on_nested_fx_trace": True},
    "torch._dynamo.utils": {"is_compile_supported": lambda device_type: False},
}


def missing() -> Optional[str]:
    """What this environment lacks for d2_memfit, and how to get it; None if nothing.

    No requirement of the package says so: pip would replace the PyTorch that this Detectron2 is
    made for.
    """
    torch = importlib.metadata.version("torch") if importlib.util.find_spec("torch") else ""
    # A folder of this name, such as that of a clone, would be found too, but has no origin.
    origin = getattr(importlib.util.find_spec("detectron2"), "origin", None)
    if origin is None:
        return (
            "d2_memfit extends Detectron2, and this environment has none: Python "
            f"{platform.python_version()}, {f'PyTorch {torch}' if torch else 'no PyTorch'}.\n"
            "Type, in a checkout of d2_memfit, for an environment with all of it:\n  make venv\n"
            f"Or, with PyTorch and a compiler, for this environment:\n  {_WITH_COMPILER}\n"
            "All ways: docs/INSTALL.md"
        )
    if not torch:
        return "Detectron2 needs PyTorch, and this environment has none: see https://pytorch.org"
    if tuple(map(int, torch.split(".")[:2])) < (2, 6):
        return f"d2_memfit needs PyTorch 2.6 or later, and this environment has {torch}"
    return None


def ignore_warnings_of_libraries() -> None:
    """Ignore warnings. Call this before PyTorch and Detectron2 are imported.

    Python's option -W and PYTHONWARNINGS still apply.
    """
    if sys.warnoptions:
        return
    # Detectron2 v0.6 and its libraries against a current Python and PyTorch
    for category in (DeprecationWarning, FutureWarning, SyntaxWarning):
        warnings.simplefilter("ignore", category)
    warnings.filterwarnings("ignore", "pkg_resources is deprecated")
    warnings.filterwarnings("ignore", "torch.meshgrid")
    warnings.filterwarnings("ignore", "Image size .* exceeds limit")  # Pillow refuses twice as many
    warnings.filterwarnings("ignore", "TypedStorage is deprecated")
    # Of AMPTrainer on a CPU, whose scaler is replaced
    warnings.filterwarnings("ignore", "torch.cuda.amp.GradScaler is enabled")
    # "No CUDA runtime is found", though nothing is compiled
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    # From is_fx_tracing, which Detectron2 main imports
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # about kernels that it does not need


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
