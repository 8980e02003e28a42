# Copyright (c) the d2_memfit developers.
"""The mapper from a tile's dict to a training input, and the loader of tiles."""

import logging
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetMapper, build_detection_train_loader, get_detection_dataset_dicts
from detectron2.data import transforms as T
from detectron2.data.samplers import RepeatFactorTrainingSampler
from torch.utils.data import DataLoader

from d2_memfit.errors import DataError

from .dataset import TiledDataset
from .reader import open_image

__all__ = ["TileMapper", "build_tiled_train_loader", "repeat_factors"]


class TileMapper(DatasetMapper):
    """Detectron2's mapper, which reads only the tile and does not resize it.

    Raises:
        DataError: on a call, the image cannot be read, or has another size than in its dataset.
    """

    @classmethod
    def from_config(cls, cfg: CfgNode, is_train: bool = True) -> dict[str, Any]:
        options = super().from_config(cfg, is_train)
        kept = [a for a in options["augmentations"] if not isinstance(a, T.ResizeShortestEdge)]
        # The dataset has cut the boxes.
        return {**options, "augmentations": kept, "recompute_boxes": False}

    def __call__(self, dataset_dict: dict[str, Any]) -> dict[str, Any]:
        dataset_dict = dict(dataset_dict)
        image = open_image(dataset_dict["file_name"], self.image_format)
        height, width = dataset_dict["image_size"]
        if (image.height, image.width) != (height, width):
            raise DataError(
                f"the image {dataset_dict['file_name']} has {image.width} x {image.height} pixels, "
                f"and by its dataset {width} x {height}: correct the dataset"
            )
        seen = T.AugInput(image.read(dataset_dict["tile"]))
        transforms = self.augmentations(seen)
        dataset_dict["image"] = torch.as_tensor(np.ascontiguousarray(seen.image.transpose(2, 0, 1)))
        self._transform_annotations(dataset_dict, transforms, seen.image.shape[:2])
        return dataset_dict


def build_tiled_train_loader(cfg: CfgNode) -> DataLoader[Any]:
    """Build Detectron2's loader for tiles of the images of DATASETS.TRAIN."""
    dicts = get_detection_dataset_dicts(cfg.DATASETS.TRAIN, filter_empty=False)
    tiles = cfg.TILES
    dataset = TiledDataset(dicts, tiles.SIZE, tiles.OVERLAP, tiles.MIN_VISIBLE)
    logging.getLogger("d2_memfit.tiled_images").info(
        "%d tiles of %d images, %.1f%% of them with objects",
        len(dataset),
        len(dicts),
        100 * dataset.has_objects.mean(),
    )
    return build_detection_train_loader(
        dataset,
        mapper=TileMapper(cfg),
        sampler=RepeatFactorTrainingSampler(repeat_factors(dataset, tiles.OBJECT_SHARE)),
        total_batch_size=cfg.SOLVER.IMS_PER_BATCH,
        aspect_ratio_grouping=False,  # tiles are square
        num_workers=cfg.DATALOADER.NUM_WORKERS,
    )


def repeat_factors(tiles: TiledDataset, object_share: float) -> torch.Tensor:
    """How often each tile is drawn in an epoch, so that this share of those drawn has objects."""
    has_objects = torch.as_tensor(tiles.has_objects)
    now = has_objects.double().mean().item()
    if now in (0, 1):
        return torch.ones(len(tiles))
    return torch.where(has_objects, object_share / now, (1 - object_share) / (1 - now)).float()
