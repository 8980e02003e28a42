# Copyright (c) the d2_memfit developers.
"""Plans for a job on tiles: the largest and most crowded input is a tile, not an image."""

from functools import partial
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog

from d2_memfit import fit_config

from .dataset import TiledDataset

__all__ = ["fit_tiled_config", "with_datasets_of_tiles"]


def fit_tiled_config(cfg: CfgNode) -> CfgNode:
    """Run :func:`d2_memfit.fit_config` for inputs of tile size."""
    planned = fit_config(with_datasets_of_tiles(cfg)).clone()
    planned.defrost()
    planned.DATASETS = cfg.DATASETS.clone()
    return planned


def with_datasets_of_tiles(cfg: CfgNode) -> CfgNode:
    """Copy the config with datasets of tiles, those that need the most memory, in place of images.

    They are registered under their own names, and have no pixels.
    """
    of_tiles = cfg.clone()
    of_tiles.defrost()
    tiles = cfg.TILES.SIZE, cfg.TILES.OVERLAP, cfg.TILES.MIN_VISIBLE
    for split in ("TRAIN", "TEST"):
        of_tiles.DATASETS[split] = tuple(_register(name, *tiles) for name in cfg.DATASETS[split])
    return of_tiles


def _register(name: str, *tiles: Any) -> str:
    name_of_tiles = f"{name}, tiles of {', '.join(map(str, tiles))}"
    if name in DatasetCatalog and name_of_tiles not in DatasetCatalog:
        DatasetCatalog.register(name_of_tiles, partial(_largest, name, *tiles))
    return name_of_tiles


def _largest(name: str, *tiles: Any) -> list[dict[str, Any]]:
    """One dict for each tile size, with as many annotations as the most crowded tile."""
    dataset = TiledDataset(DatasetCatalog.get(name), *tiles)
    most = int(dataset.num_objects.max(initial=0))
    return [
        {"height": height, "width": width, "annotations": [{}] * most}
        for height, width in sorted(dataset.sizes)
    ]
