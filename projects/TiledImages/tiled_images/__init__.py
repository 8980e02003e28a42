# Copyright (c) the d2_memfit developers.
"""Training and prediction, tile by tile, on images that do not fit as a whole."""

from .config import add_tiled_config, load_tiled_cfg
from .planning import fit_tiled_config
from .predictor import TiledPredictor
from .trainer import TiledTrainer

__all__ = ["TiledPredictor", "TiledTrainer", "add_tiled_config", "fit_tiled_config"]
__all__ += ["load_tiled_cfg"]
