# Copyright (c) the d2_memfit developers.
"""The config keys of this project."""

from collections.abc import Sequence
from typing import Any

from detectron2.config import CfgNode

from d2_memfit.common.checks import check_bool, check_positive_int, whole
from d2_memfit.config.load import load_cfg
from d2_memfit.config.settings import check_settings
from d2_memfit.engine.launch import usable_device
from d2_memfit.errors import ConfigError

__all__ = ["add_tiled_config", "check_tiles", "load_tiled_cfg"]


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
    # Bands of the file that are red, green and blue, from 1. Other numbers of bands need a
    # MODEL.PIXEL_MEAN and PIXEL_STD of as many numbers.
    cfg.TILES.BANDS = [1, 2, 3]
    # Whether images that cannot be read are left out, with a warning, or end the run.
    cfg.TILES.SKIP_CORRUPT = False


def check_tiles(cfg: CfgNode) -> None:
    """Raise :class:`ConfigError` on the first invalid value."""
    tiles = cfg.TILES
    check_positive_int("TILES.SIZE", tiles.SIZE)
    whole()("TILES.OVERLAP", tiles.OVERLAP)  # without, nothing can be merged
    if tiles.OVERLAP >= tiles.SIZE:
        raise ConfigError(
            f"TILES.OVERLAP must be less than TILES.SIZE, {tiles.SIZE}, got {tiles.OVERLAP}"
        )
    for key in ("OBJECT_SHARE", "MIN_VISIBLE", "MERGE_IOU"):
        value = tiles[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise ConfigError(f"TILES.{key} must be a number from 0 to 1, got {value!r}")
    check_positive_int("TILES.BATCH_SIZE", tiles.BATCH_SIZE)
    if not isinstance(tiles.BANDS, Sequence) or not tiles.BANDS:
        raise ConfigError(f"TILES.BANDS must be a list of numbers from 1, got {tiles.BANDS!r}")
    for band in tiles.BANDS:
        check_positive_int("TILES.BANDS", band)
    if len(tiles.BANDS) != len(cfg.MODEL.PIXEL_MEAN):
        raise ConfigError(
            f"TILES.BANDS has {len(tiles.BANDS)} bands, and MODEL.PIXEL_MEAN has "
            f"{len(cfg.MODEL.PIXEL_MEAN)} numbers: give each band its mean"
        )
    check_bool("TILES.SKIP_CORRUPT", tiles.SKIP_CORRUPT)
    if cfg.INPUT.CROP.ENABLED:
        raise ConfigError("INPUT.CROP.ENABLED must be False: tiles are the crops, see TILES.SIZE")
    if cfg.MODEL.KEYPOINT_ON:
        raise ConfigError("MODEL.KEYPOINT_ON must be False: keypoints are not merged across seams")
    if cfg.MODEL.META_ARCHITECTURE in ("PanopticFPN", "SemanticSegmentor"):
        raise ConfigError(
            f"MODEL.META_ARCHITECTURE {cfg.MODEL.META_ARCHITECTURE} cannot be trained on tiles: "
            "they have boxes and masks of objects"
        )
    if cfg.MODEL.LOAD_PROPOSALS:
        raise ConfigError("MODEL.LOAD_PROPOSALS must be False: proposals are of whole images")


def load_tiled_cfg(config_file: str, opts: Sequence[Any]) -> CfgNode:
    """Load and check the config of a file and of ``KEY VALUE`` pairs.

    INPUT gets the tile's sizes, for code that reads the input size from the config.
    """
    cfg = load_cfg(config_file, opts, [add_tiled_config])
    check_tiles(cfg)
    size = cfg.TILES.SIZE
    cfg.INPUT.MIN_SIZE_TRAIN = (size,)
    cfg.INPUT.MIN_SIZE_TEST = cfg.INPUT.MAX_SIZE_TRAIN = cfg.INPUT.MAX_SIZE_TEST = size
    cfg.MODEL.DEVICE = usable_device(cfg.MODEL.DEVICE)
    check_settings(cfg)
    return cfg
