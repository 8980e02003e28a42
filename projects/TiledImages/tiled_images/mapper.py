# Copyright (c) the d2_memfit developers.
"""The mapper from a tile's dict to a training input."""

import logging
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode, configurable
from detectron2.data import DatasetMapper, build_detection_train_loader, get_detection_dataset_dicts
from detectron2.data import transforms as T
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from d2_memfit.errors import DataError

from .dataset import BalancedTileSampler, TiledDataset
from .reader import CorruptImageError, open_image, warn_left_out

__all__ = ["MappedTiles", "TileMapper", "build_tiled_train_loader"]


class TileMapper(DatasetMapper):
    """Detectron2's mapper, which reads only the tile and does not resize it.

    Args:
        bands: TILES.BANDS.

    Raises:
        CorruptImageError: on a call, the image cannot be read.
        DataError: the image has another size than in its dataset.
    """

    @configurable  # type: ignore[untyped-decorator]
    def __init__(self, *args: Any, bands: list[int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bands = bands

    @classmethod
    def from_config(cls, cfg: CfgNode, is_train: bool = True) -> dict[str, Any]:
        options = super().from_config(cfg, is_train)
        kept = [a for a in options["augmentations"] if not isinstance(a, T.ResizeShortestEdge)]
        return {
            **options,
            "augmentations": kept,
            "recompute_boxes": False,  # the dataset has done it
            "bands": cfg.TILES.BANDS,
        }

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any]:
        dataset_dict = dict(dataset_dict)
        seen = T.AugInput(self._read(dataset_dict))
        transforms = self.augmentations(seen)
        dataset_dict["image"] = torch.as_tensor(np.ascontiguousarray(seen.image.transpose(2, 0, 1)))
        self._transform_annotations(dataset_dict, transforms, seen.image.shape[:2])
        return dataset_dict

    def _read(self, dataset_dict: dict[str, Any]) -> NDArray[Any]:
        image = open_image(dataset_dict["file_name"], self.image_format, self._bands)
        height, width = dataset_dict["image_size"]
        if (image.height, image.width) != (height, width):
            raise DataError(
                f"the image {dataset_dict['file_name']} has {image.width} x {image.height} pixels, "
                f"and by its dataset {width} x {height}: correct the dataset"
            )
        return image.read(dataset_dict["tile"])


class MappedTiles(Dataset[dict[str, Any]]):
    """The mapper's result for each tile.

    Detectron2's ``MapDataset`` cannot skip items from Python 3.11 on.

    Args:
        skip_corrupt: whether to replace a tile that cannot be read, with a warning, by another one
            that also has, or lacks, objects. If not, it is an error.
    """

    _MOST_TRIES = 100

    def __init__(self, tiles: TiledDataset, mapper: TileMapper, skip_corrupt: bool) -> None:
        self._tiles = tiles
        self._mapper = mapper
        self._tries = self._MOST_TRIES if skip_corrupt else 1

    def __len__(self) -> int:
        return len(self._tiles)

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        for remaining in reversed(range(self._tries)):
            try:
                return self._mapper(self._tiles[index])
            except CorruptImageError as e:
                if not remaining:
                    raise
                warn_left_out(e)
            has_objects = self._tiles.has_objects
            index = int(rng.choice(np.flatnonzero(has_objects == has_objects[index])))
        raise AssertionError("the last try returns or raises")


def build_tiled_train_loader(cfg: CfgNode) -> DataLoader[Any]:
    """Build Detectron2's loader for tiles of the images of DATASETS.TRAIN."""
    dicts = get_detection_dataset_dicts(cfg.DATASETS.TRAIN, filter_empty=False)
    tiles = cfg.TILES
    dataset = TiledDataset(dicts, tiles.SIZE, tiles.OVERLAP, tiles.MIN_VISIBLE)
    share = dataset.has_objects.mean()
    logging.getLogger("d2_memfit.tiled_images").info(
        "%d tiles of %d images, %.1f%% of them with objects; %.1f%% of those drawn have some",
        len(dataset),
        len(dicts),
        100 * share,
        100 * (tiles.OBJECT_SHARE if 0 < share < 1 else share),
    )
    return build_detection_train_loader(
        MappedTiles(dataset, TileMapper(cfg), tiles.SKIP_CORRUPT),
        mapper=None,
        sampler=BalancedTileSampler(dataset.has_objects, tiles.OBJECT_SHARE),
        total_batch_size=cfg.SOLVER.IMS_PER_BATCH,
        aspect_ratio_grouping=False,  # tiles are square
        num_workers=cfg.DATALOADER.NUM_WORKERS,
    )
