# Copyright (c) the d2_memfit developers.
"""What an environment lacks for d2_memfit, and the line to type. Standard library only."""

import importlib.metadata
import importlib.util
import platform
from pathlib import Path
from typing import Optional

__all__ = ["missing"]

_MAIN = "'git+https://github.com/facebookresearch/detectron2.git'"
_OLDEST_PYTORCH = (2, 6)


def missing() -> Optional[str]:
    """What this environment lacks for d2_memfit, and how to get it; None if nothing.

    No requirement of the package says so: pip would replace the PyTorch that this Detectron2 is
    made for.
    """
    has_torch = importlib.util.find_spec("torch") is not None
    torch = importlib.metadata.version("torch") if has_torch else ""
    # A folder of this name, such as that of a clone, would be found too, but has no origin.
    origin = getattr(importlib.util.find_spec("detectron2"), "origin", None)
    if origin is None:
        with_compiler = "pip install 'setuptools<82' wheel ninja && "
        with_compiler += f"pip install --no-build-isolation {_MAIN}"
        return (
            "d2_memfit extends Detectron2, and this environment has none: Python "
            f"{platform.python_version()}, {f'PyTorch {torch}' if torch else 'no PyTorch'}.\n"
            "Type, in a checkout of d2_memfit, for an environment with all of it:\n  make venv\n"
            f"Or, with PyTorch and a compiler, for this environment:\n  {with_compiler}\n"
            "All ways: docs/INSTALL.md"
        )
    hooks = Path(origin).with_name("engine") / "hooks.py"
    if hooks.is_file() and "class BestCheckpointer" not in hooks.read_text("utf-8"):
        return (
            f"d2_memfit needs Detectron2 v0.6 or main, and {Path(origin).parent} is older. Install "
            "a newer one. If it is a project's own copy, add the project's files to v0.6"
        )
    if not torch:
        return "Detectron2 needs PyTorch, and this environment has none: see https://pytorch.org"
    if tuple(map(int, torch.split(".")[:2])) < _OLDEST_PYTORCH:
        return f"d2_memfit needs PyTorch 2.6 or later, and this environment has {torch}"
    return None
