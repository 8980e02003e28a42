# Copyright (c) the d2_memfit developers.
"""Pictures of the objects that a model has found, drawn with Detectron2's Visualizer."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from detectron2.data import Metadata
from detectron2.data.detection_utils import convert_image_to_rgb
from numpy.typing import NDArray

from ..errors import ConfigError, printable

__all__ = ["draw", "import_visualizer"]

# Limits of a picture's longer side, in pixels.
_LEAST_SIDE = 600
_MOST_SIDE = 4096


def import_visualizer() -> Any:
    """Detectron2's ``Visualizer``.

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
    return Visualizer


def _label(names: Sequence[str], number: int) -> str:
    """The name or number of a class as a label: at most 100 characters, and no formulas."""
    name = names[number] if number < len(names) else str(number)
    return printable(name[:100]).replace("$", r"\$")


def draw(
    image: NDArray[np.uint8],
    image_format: str,
    results: Sequence[dict[str, Any]],
    metadata: Metadata,
    keeps_size: bool = False,
) -> NDArray[np.uint8]:
    """Draw objects into an image. The picture is in RGB.

    Masks are decoded one at a time. Small images are enlarged and very large ones reduced, unless
    ``keeps_size``.

    Args:
        image: pixels [height, width, 3] in ``image_format``, such as "BGR".
        results: in COCO's results format, with the model's classes.
        metadata: names of the classes and rules for keypoints, if there are any.
    """
    longer = max(image.shape)
    scale = 1.0 if keeps_size else min(max(1.0, _LEAST_SIDE / longer), _MOST_SIDE / longer)
    visualizer = import_visualizer()(convert_image_to_rgb(image, image_format), metadata, scale)
    names = metadata.get("thing_classes") or []
    for result in sorted(results, key=lambda r: -r["bbox"][2] * r["bbox"][3]):
        x, y, width, height = result["bbox"]
        name = _label(names, result["category_id"])
        keypoints = result.get("keypoints")
        visualizer.overlay_instances(
            boxes=np.array([[x, y, x + width, y + height]]),
            labels=[f"{name} {result['score']:.0%}"],
            masks=[result["segmentation"]] if "segmentation" in result else None,
            keypoints=None if keypoints is None else np.reshape(keypoints, (1, -1, 3)),
        )
    picture: NDArray[np.uint8] = visualizer.get_output().get_image()
    return picture
