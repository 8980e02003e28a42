# Copyright (c) the d2_memfit developers.
"""Pictures of a trained model's predictions."""

import math
from pathlib import Path

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.detection_utils import read_image
from detectron2.engine import DefaultPredictor
from numpy.typing import NDArray
from PIL import Image

from ..errors import ConfigError

__all__ = ["draw_predictions"]

_COLUMNS = 2
_LONGER_SIDE = 600  # pixels of each drawing, at least


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
    try:
        from detectron2.utils.visualizer import Visualizer
    except ImportError as e:
        raise ConfigError(
            f"Detectron2 draws with OpenCV, which is not installed ({e}): pip install "
            "opencv-python-headless"
        ) from e
    dicts = DatasetCatalog.get(dataset_name)[:num_images]
    predictor = DefaultPredictor(cfg)
    pictures = []
    for d in dicts:
        image = read_image(d["file_name"], format="BGR")
        found = predictor(image)["instances"].to("cpu")
        scale = max(1.0, _LONGER_SIDE / max(image.shape))
        visualizer = Visualizer(image[:, :, ::-1], MetadataCatalog.get(dataset_name), scale)
        drawing = visualizer.draw_instance_predictions(found[found.scores > min_score])
        pictures.append(drawing.get_image())
    Image.fromarray(_side_by_side(pictures)).save(to)


def _side_by_side(pictures: list[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    height, width = (max(p.shape[i] for p in pictures) for i in (0, 1))
    rows = math.ceil(len(pictures) / _COLUMNS)
    result = np.zeros((rows * height, min(_COLUMNS, len(pictures)) * width, 3), dtype=np.uint8)
    for i, picture in enumerate(pictures):
        top, left = i // _COLUMNS * height, i % _COLUMNS * width
        result[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    return result
