# Copyright (c) the d2_memfit developers.
"""The config keys of this project."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from detectron2.config import CfgNode

from d2_memfit.common.checks import Check, check_all, fits, value_of, whole
from d2_memfit.config.load import load_cfg
from d2_memfit.config.settings import check_settings
from d2_memfit.engine.launch import usable_device
from d2_memfit.errors import ConfigError

__all__ = ["add_tiled_config", "load_tiled_cfg"]

_SHARE = Check("a number from 0 to 1", lambda value: fits(value, float) and 0 <= value <= 1)
_OFF = Check("False: tiles are the crops, and have boxes and masks of objects", lambda v: not v)
_CHECKS = {
    "TILES.SIZE": whole(),
    "TILES.OVERLAP": whole(),  # without, nothing can be merged
    **dict.fromkeys(("TILES.OBJECT_SHARE", "TILES.MIN_VISIBLE", "TILES.MERGE_IOU"), _SHARE),
    "TILES.BATCH_SIZE": whole(),
    **dict.fromkeys(("INPUT.CROP.ENABLED", "MODEL.KEYPOINT_ON", "MODEL.LOAD_PROPOSALS"), _OFF),
}


def add_tiled_config(cfg: CfgNode) -> None:
    """Add the node TILES to a Detectron2 config."""
    cfg.TILES = CfgNode()
    # Height and width of a tile, in pixels of the image. It is not resized, so objects keep their
    # sizes. An image smaller than that is one tile.
    cfg.TILES.SIZE = 1024
    # Pixels that a tile shares with its neighbour. Objects up to this size are whole in some tile;
    # larger ones are put together out of their parts.
    cfg.TILES.OVERLAP = 200
    # Share of the tiles in training that have an object.
    cfg.TILES.OBJECT_SHARE = 0.75
    # An object is trained on in a tile that shows at least this share of its box, or, of one larger
    # than a tile, of what a tile can show.
    cfg.TILES.MIN_VISIBLE = 0.1
    # Parts in two tiles are one object if they agree that much where the tiles overlap (IoU).
    cfg.TILES.MERGE_IOU = 0.5
    # Tiles in one forward of the prediction.
    cfg.TILES.BATCH_SIZE = 1


def load_tiled_cfg(config_file: str, opts: Sequence[Any]) -> CfgNode:
    """Load and check the config of a file and of ``KEY VALUE`` pairs.

    INPUT gets the tile's sizes, for code that reads the input size from the config.

    Raises:
        ConfigError: with a line for each wrong value.
    """
    cfg = load_cfg(config_file, opts, [add_tiled_config])
    checks = _CHECKS.items()
    check_all(([key], partial(check, key, value_of(cfg, key))) for key, check in checks)
    size, overlap = cfg.TILES.SIZE, cfg.TILES.OVERLAP
    if overlap >= size:
        raise ConfigError(f"TILES.OVERLAP must be less than TILES.SIZE, {size}, got {overlap}")
    cfg.INPUT.MIN_SIZE_TRAIN = (size,)
    cfg.INPUT.MIN_SIZE_TEST = cfg.INPUT.MAX_SIZE_TRAIN = cfg.INPUT.MAX_SIZE_TEST = size
    cfg.MODEL.DEVICE = usable_device(cfg.MODEL.DEVICE)
    check_settings(cfg)
    return cfg
