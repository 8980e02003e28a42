# Copyright (c) the d2_memfit developers.
"""Training and prediction, tile by tile, on images that do not fit as a whole."""

from .config import add_tiled_config, check_tiles, load_tiled_cfg
from .dataset import BalancedTileSampler, TiledDataset
from .mapper import TileMapper, build_tiled_train_loader
from .planning import fit_tiled_config
from .predictor import TiledPredictor
from .reader import CorruptImageError, ImageReader, warn_left_out
from .trainer import TiledTrainer

__all__ = [
    "BalancedTileSampler",
    "CorruptImageError",
    "ImageReader",
    "TileMapper",
    "TiledDataset",
    "TiledPredictor",
    "TiledTrainer",
    "add_tiled_config",
    "build_tiled_train_loader",
    "check_tiles",
    "fit_tiled_config",
    "load_tiled_cfg",
    "warn_left_out",
]
