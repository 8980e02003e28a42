# Copyright (c) the d2_memfit developers.
"""Pictures of the first images that a training gets, with their annotations, for TensorBoard."""

import logging
from typing import Any

import numpy as np
import torch
from detectron2.data import Metadata
from detectron2.data.detection_utils import convert_image_to_rgb
from detectron2.engine import HookBase
from detectron2.structures import PolygonMasks
from detectron2.utils.events import get_event_storage
from torch import nn

from ..inference import class_label, import_visualizer

__all__ = ["FirstImages"]

logger = logging.getLogger(__name__)

_MOST = 4  # images


class FirstImages(HookBase):
    """Draws images of the first forward as the model gets them, after augmentation.

    What is wrong with annotations is seen before hours are trained on them. Random numbers stay
    those of a training without the pictures.

    Args:
        image_format: INPUT.FORMAT.
        metadata: names of the classes.
    """

    def __init__(self, image_format: str, metadata: Metadata) -> None:
        self._image_format = image_format
        self._names = metadata.get("thing_classes") or []
        self._handle: Any = None

    def before_train(self) -> None:
        if self.trainer.start_iter == 0:
            self._handle = self.trainer.model.register_forward_pre_hook(self._draw_once)

    def _draw_once(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        self._handle.remove()
        state = np.random.get_state()  # the Visualizer draws colours
        try:
            for i, image in enumerate(args[0][:_MOST]):
                get_event_storage().put_image(f"first images/{i}", self._picture(image))
        except Exception as e:  # no training ends for its pictures
            logger.warning("The first images cannot be drawn (%s: %s)", type(e).__name__, e)
        finally:
            np.random.set_state(state)

    def _picture(self, image: dict[str, Any]) -> torch.Tensor:
        pixels = convert_image_to_rgb(image["image"].permute(1, 2, 0).cpu(), self._image_format)
        visualizer = import_visualizer()(pixels)
        objects = image.get("instances")
        if objects is not None and objects.has("gt_boxes"):
            classes = objects.gt_classes.tolist() if objects.has("gt_classes") else []
            masks = objects.gt_masks if objects.has("gt_masks") else None
            visualizer.overlay_instances(
                boxes=objects.gt_boxes.to("cpu"),
                labels=[class_label(self._names, number) for number in classes] or None,
                masks=masks.polygons if isinstance(masks, PolygonMasks) else None,
            )
        return torch.from_numpy(visualizer.get_output().get_image().transpose(2, 0, 1).copy())
