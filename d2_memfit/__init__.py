"""d2_memfit makes any Detectron2 training job fit the memory that its user has."""

import importlib.util

# A folder of this name, such as that of a clone, would be found too, but has no origin.
if getattr(importlib.util.find_spec("detectron2"), "origin", None) is None:
    raise ImportError(
        "d2_memfit extends Detectron2, and this environment has none. Ways to get it:\n"
        "  - main, with a compiler: pip install "
        "'git+https://github.com/facebookresearch/detectron2.git'\n"
        "  - v0.6, ready built: https://detectron2.readthedocs.io/en/latest/tutorials/install.html\n"
        "  - v0.6, without compiled operators: `make venv` in a checkout of d2_memfit"
    )

from .config import add_memfit_config, get_cfg
from .engine import AccumulatingTrainer, MemfitMixin, MemfitTrainer
from .planner import estimate_memory, fit_config, plan_memory

__version__ = "0.1.0"

__all__ = [
    "AccumulatingTrainer",
    "MemfitMixin",
    "MemfitTrainer",
    "add_memfit_config",
    "estimate_memory",
    "fit_config",
    "get_cfg",
    "plan_memory",
]
