# Copyright (c) the d2_memfit developers.
"""A trained model that finds the objects in an image."""

import os
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import torch
from detectron2.config import CfgNode, instantiate
from detectron2.data import transforms as T
from detectron2.data.detection_utils import build_augmentation
from detectron2.evaluation.coco_evaluation import instances_to_coco_json
from detectron2.structures import Instances
from numpy.typing import NDArray
from omegaconf import DictConfig
from torch import nn

from ..common.errors import ConfigError, DataError
from ..engine.checkpoint import MemfitCheckpointer
from ..job import Job
from .tiles import Detection, Grid, SeamMerger, found_in_tile, to_coco

__all__ = ["Predictor", "load_whole_model", "weights_of"]

_OVERLAP = 0.2  # share of a tile, as in SAHI
_MERGE_IOU = 0.5


def weights_of(config_file: str, configured: str, given: Optional[str]) -> str:
    """The trained weights: the given ones, the last in the config's folder, or MODEL.WEIGHTS.

    Raises:
        ConfigError: there are none.
    """
    folder = Path(config_file).parent
    last = folder / "last_checkpoint"  # also written by a run that continued after its end
    names = last.read_text(errors="replace").splitlines() if last.is_file() else []
    files = [str(folder / name) for name in (*names, "model_final.pth")]
    weights = given or next(filter(os.path.isfile, files), configured)
    if not weights:
        what = "--weights: name the file of a trained model"
        raise ConfigError(f"{what}. The config names none, and its folder has no checkpoint")
    return weights


class Predictor:
    """Finds objects like Detectron2's ``DefaultPredictor``, or tile by tile.

    Args:
        config: the job's config, whose test mapper resizes images.
        job: makes the model.
        weights: a file with all of the model's parameters.
        tile_size: height and width of tiles in pixels; None gives the model whole images.

    Attributes:
        model: in evaluation mode.
        image_format: the model's order of channels, such as "BGR".
        tile_size: as the argument.

    Raises:
        CheckpointError: the weights are not those of this model.
    """

    def __init__(
        self,
        config: Union[CfgNode, DictConfig],
        job: Job,
        weights: str,
        tile_size: Optional[int] = None,
    ) -> None:
        self.model = job.build_model().eval()
        load_whole_model(self.model, weights)
        if isinstance(config, DictConfig):
            mapper = instantiate(config.dataloader.test.mapper)
            self.image_format = mapper.image_format
            self._augmentations = mapper.augmentations
        else:  # Detectron2's mapper would need the training dataset
            self.image_format = config.INPUT.FORMAT
            self._augmentations = T.AugmentationList(build_augmentation(config, is_train=False))
        self.tile_size = tile_size

    def __call__(self, image: NDArray[np.uint8], image_id: int) -> list[dict[str, Any]]:
        """Find the objects of an image, in COCO's results format, with the model's classes.

        Args:
            image: pixels [height, width, 3] in ``image_format``.

        Raises:
            DataError: the image is too thin to be resized, or too large for masks.
        """
        if self.tile_size is None:
            found: list[dict[str, Any]] = instances_to_coco_json(self._instances(image), image_id)
            return found
        height, width = image.shape[:2]
        grid = Grid(height, width, self.tile_size, round(self.tile_size * _OVERLAP))
        merger = SeamMerger(grid, _MERGE_IOU)
        merged: list[Detection] = []
        for tile in grid:
            instances = self._instances(image[tile.y0 : tile.y1, tile.x0 : tile.x1])
            if instances.has("pred_keypoints"):
                raise ConfigError("--tile-size: keypoints of overlapping tiles cannot be merged")
            merged += merger.add(tile, found_in_tile(instances, tile))
        return [to_coco(detection, image_id) for detection in (*merged, *merger.finish())]

    @torch.no_grad()
    def _instances(self, image: NDArray[np.uint8]) -> Instances:
        """What the model finds, in pixels of the image."""
        height, width = image.shape[:2]
        resized = T.AugInput(image)
        try:
            self._augmentations(resized)
        except ValueError as e:  # Pillow's, if no pixel would be left
            raise DataError(f"{width} x {height} pixels cannot be resized ({e})") from e
        pixels = torch.as_tensor(np.ascontiguousarray(resized.image.transpose(2, 0, 1)))
        output = self.model([{"image": pixels, "height": height, "width": width}])[0]
        if "instances" not in output:
            raise ConfigError(f"a {type(self.model).__name__} finds no objects, of any kind")
        return output["instances"].to("cpu")


def load_whole_model(model: nn.Module, weights: str) -> None:
    """Load weights into a model.

    Raises:
        CheckpointError: the file cannot be read, or has no values for some of the model's
            parameters.
    """
    checkpointer = MemfitCheckpointer(model)
    checkpointer.needs_all = True
    checkpointer.check(weights, resume=False)
    checkpointer.load(weights)
