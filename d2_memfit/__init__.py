# Copyright (c) the d2_memfit developers.
"""Detectron2 training jobs that fit the memory their user has."""

import importlib
import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from .config import add_memfit_config, get_cfg
    from .counts import window_count
    from .engine import AccumulatingTrainer, MemfitMixin, MemfitTrainer
    from .job import Job
    from .planner import fit_config
    from .planner.estimates import estimate_memory
    from .planner.search import plan_memory

__version__ = "0.2.0"

__all__ = [
    "AccumulatingTrainer",
    "Job",
    "MemfitMixin",
    "MemfitTrainer",
    "add_memfit_config",
    "estimate_memory",
    "fit_config",
    "get_cfg",
    "plan_memory",
    "window_count",
]

_HOMES = {
    "AccumulatingTrainer": "engine",
    "Job": "job",
    "MemfitMixin": "engine",
    "MemfitTrainer": "engine",
    "add_memfit_config": "config",
    "estimate_memory": "planner",
    "fit_config": "planner",
    "get_cfg": "config",
    "plan_memory": "planner",
    "window_count": "counts",
}


def missing() -> Optional[str]:
    """What this environment lacks for d2_memfit, and how to get it; None if nothing.

    No requirement of the package says so: pip would replace the PyTorch that this Detectron2 is
    made for.
    """
    # A folder of this name, such as that of a clone, would be found too, but has no origin.
    if getattr(importlib.util.find_spec("detectron2"), "origin", None) is None:
        return (
            "d2_memfit extends Detectron2, and this environment has none. Ways to get it:\n"
            "  - main, with a compiler: pip install "
            "'git+https://github.com/facebookresearch/detectron2.git'\n"
            "  - v0.6, ready built: "
            "https://detectron2.readthedocs.io/en/latest/tutorials/install.html\n"
            "  - v0.6, without compiled operators: `make venv` in a checkout of d2_memfit"
        )
    if importlib.util.find_spec("torch") is None:
        return "Detectron2 needs PyTorch, and this environment has none: see https://pytorch.org"
    torch = importlib.metadata.version("torch")
    if tuple(map(int, torch.split(".")[:2])) < (2, 6):
        return f"d2_memfit needs PyTorch 2.6 or later, and this environment has {torch}"
    return None


def __getattr__(name: str) -> Any:
    """Import a public name or a module when it is first used.

    So a command can set up its process before PyTorch and Detectron2 are imported, and show its
    help without them.
    """
    if name in _HOMES:
        lacks = missing()
        if lacks is not None:
            raise ImportError(lacks)
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
