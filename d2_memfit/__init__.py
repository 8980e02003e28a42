# Copyright (c) the d2_memfit developers.
"""Detectron2 training jobs that fit the memory their user has."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from .common.startup import missing

if TYPE_CHECKING:
    from .config import model_zoo
    from .config.load import add_memfit_config, get_cfg
    from .engine.counts import window_count
    from .engine.defaults import MemfitMixin, MemfitTrainer
    from .engine.train_loop import AccumulatingTrainer
    from .job import Job
    from .planner.estimate import estimate_memory
    from .planner.fit_config import fit_config
    from .planner.plan import plan_memory

__version__ = "0.3.0"

__all__ = [
    "AccumulatingTrainer",
    "Job",
    "MemfitMixin",
    "MemfitTrainer",
    "add_memfit_config",
    "estimate_memory",
    "fit_config",
    "get_cfg",
    "model_zoo",
    "plan_memory",
    "window_count",
]

_HOMES = {
    "AccumulatingTrainer": "engine.train_loop",
    "Job": "job",
    "MemfitMixin": "engine.defaults",
    "MemfitTrainer": "engine.defaults",
    "add_memfit_config": "config.load",
    "estimate_memory": "planner.estimate",
    "fit_config": "planner.fit_config",
    "get_cfg": "config.load",
    "model_zoo": "config.model_zoo",
    "plan_memory": "planner.plan",
    "window_count": "engine.counts",
}


def __getattr__(name: str) -> Any:
    """Import a public name or a module when it is first used.

    So a command can set up its process before PyTorch and Detectron2 are imported, and show its
    help without them.
    """
    if name in _HOMES:
        lacks = missing()
        if lacks is not None:
            raise ImportError(lacks)
        home = importlib.import_module(f".{_HOMES[name]}", __name__)
        return getattr(home, name, home)  # model_zoo is itself a module
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
