# Copyright (c) the d2_memfit developers.
"""Pictures of a trained model's predictions."""

import math
from pathlib import Path

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from numpy.typing import NDArray
from PIL import Image

from ..inference import Predictor, draw, import_visualizer, read_images
from ..job import Job

__all__ = ["draw_predictions"]

_COLUMNS = 2


def draw_predictions(
    cfg: CfgNode, dataset_name: str, to: Path, num_images: int, min_score: float
) -> None:
    """Draw a model's predictions in the first images of a dataset, in one picture.

    Args:
        cfg: with the trained MODEL.WEIGHTS.
        dataset_name: a registered dataset, whose classes have names.
        to: a file whose name ends in .png or .jpg.
        num_images: how many images.
        min_score: smallest score of predictions that are drawn.

    Raises:
        ConfigError: OpenCV is not installed.
    """
    import_visualizer()
    predictor = Predictor(cfg, Job.from_cfg(cfg), cfg.MODEL.WEIGHTS)
    pictures = []
    for number, d in enumerate(DatasetCatalog.get(dataset_name)[:num_images]):
        (image,) = read_images(Path(d["file_name"]), predictor.image_format)
        found = [result for result in predictor(image, number) if result["score"] > min_score]
        metadata = MetadataCatalog.get(dataset_name)
        pictures.append(draw(image, predictor.image_format, found, metadata))
    Image.fromarray(_side_by_side(pictures)).save(to)


def _side_by_side(pictures: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    height, width = (max(p.shape[i] for p in pictures) for i in (0, 1))
    rows = math.ceil(len(pictures) / _COLUMNS)
    result = np.zeros((rows * height, min(_COLUMNS, len(pictures)) * width, 3), dtype=np.uint8)
    for i, picture in enumerate(pictures):
        top, left = i // _COLUMNS * height, i % _COLUMNS * width
        result[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    return result
