# Copyright (c) the d2_memfit developers.
"""Detectors of the transformers library as a meta-architecture of Detectron2."""

from collections.abc import Sequence
from typing import Any, Optional

import torch
import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.modeling.postprocessing import sem_seg_postprocess
from detectron2.structures import ImageList, Instances
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from d2_memfit.common.errors import ConfigError

from .average import averaged_model
from .build import build_transformers_model, load_pretrained
from .config import check_transformers_config
from .data import resolutions
from .families import FAMILIES
from .losses import losses_by_name
from .results import instances_of, labels_of

__all__ = ["TransformersDetector"]


@META_ARCH_REGISTRY.register()
class TransformersDetector(nn.Module):
    """A detector of transformers with Detectron2's interface.

    It takes dataset dicts and returns a dict of losses; in evaluation it returns a list of
    ``{"instances": Instances}``. Modules and losses are those of transformers.

    Attributes:
        ema: the average of the model's weights, or None. It is evaluated once it has been updated.
            Checkpoints contain it, and dry runs count it, because it is a part of this module.
        num_classes_key: the config key of the number of classes, for d2_memfit.
    """

    num_classes_key = "MODEL.ROI_HEADS.NUM_CLASSES"
    pixel_mean: Tensor
    pixel_std: Tensor
    model: Any
    ema: Optional[AveragedModel]

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__()
        check_transformers_config(cfg)
        keys, mean, std = cfg.TRANSFORMERS, cfg.MODEL.PIXEL_MEAN, cfg.MODEL.PIXEL_STD
        self.model = build_transformers_model(cfg)
        self.family = FAMILIES[keys.TYPE]
        self.resolution = keys.RESOLUTION
        self.size_divisibility = _divisor(self.model.config)
        self.detections_per_image = cfg.TEST.DETECTIONS_PER_IMAGE
        _check_resolutions(cfg, self.size_divisibility, self.model.config)
        for name, parameter in self.model.named_parameters():
            if name.endswith("embeddings.mask_token"):  # of DINOv2's pretraining, in no forward
                parameter.requires_grad_(False)
        self.register_buffer("pixel_mean", torch.tensor(mean).view(-1, 1, 1), False)
        self.register_buffer("pixel_std", torch.tensor(std).view(-1, 1, 1), False)
        has_average = keys.EMA_DECAY > 0
        self.ema = averaged_model(self.model, keys.EMA_DECAY, keys.EMA_TAU) if has_average else None

    @property
    def device(self) -> torch.device:
        return self.pixel_mean.device

    def forward(self, batch: list[dict[str, Any]]) -> Any:
        images = [(d["image"].to(self.device) - self.pixel_mean) / self.pixel_std for d in batch]
        if self.resolution and not self.training:  # for images of other mappers
            square = (self.resolution, self.resolution)
            images = [F.interpolate(i[None], square, mode="bilinear")[0] for i in images]
        padded = ImageList.from_tensors(images, self.size_divisibility)
        inputs: dict[str, Any] = {"pixel_values": padded.tensor}
        if self.family.takes_mask:
            ones = [torch.ones_like(image[0], dtype=torch.long) for image in images]
            inputs["pixel_mask"] = ImageList.from_tensors(ones, self.size_divisibility).tensor
        if not self.training:
            output = self.best_model(**inputs)
            return [
                {"instances": self._instances(output, i, d, padded)} for i, d in enumerate(batch)
            ]
        objects = [d["instances"].to(self.device) for d in batch]
        has_masks = self.family.mask_class == type(self.model).__name__
        frame = padded.tensor.shape[-2:]
        labels = labels_of(objects, frame, self.family.takes_mask, has_masks)
        if self.family.box_class is None:
            inputs["class_labels"] = [of_image["class_labels"] for of_image in labels]
            inputs["mask_labels"] = [of_image["masks"].float() for of_image in labels]
        else:
            inputs["labels"] = labels
        return losses_by_name(self.model, self.family, inputs)

    @property
    def best_model(self) -> nn.Module:
        """The averaged model if it was updated, otherwise the model."""
        if self.ema is None or self.ema.n_averaged == 0:
            return self.model
        return self.ema.module

    def load_pretrained(self, weights: str) -> None:
        """Load weights as ``build.load_pretrained`` does, also into the average."""
        load_pretrained(self.model, weights)
        if self.ema is not None:
            self.ema.module.load_state_dict(self.model.state_dict())

    def save_pretrained(self, folder: str, class_names: Optional[Sequence[str]] = None) -> None:
        """Write the evaluated model in transformers' format: config.json and model.safetensors."""
        model: Any = self.best_model
        if class_names:
            model.config.id2label = dict(enumerate(class_names))
            model.config.label2id = {name: i for i, name in enumerate(class_names)}
        model.save_pretrained(folder)

    def _instances(
        self, output: Any, index: int, data: dict[str, Any], images: ImageList
    ) -> Instances:
        (h, w), (of_h, of_w) = images.image_sizes[index], images.tensor.shape[-2:]
        shown = h / of_h, w / of_w
        height, width = data["image"].shape[-2:]
        size = (data.get("height", height), data.get("width", width))
        num = self.detections_per_image
        found = instances_of(output, index, shown, size, num, sem_seg_postprocess)
        if not self.family.takes_mask:  # boxes are relative to the padded frame
            found.pred_boxes.scale(1 / shown[1], 1 / shown[0])
        found.pred_boxes.clip(size)
        return found


def _divisor(config: Any) -> int:
    """Number by which height and width must be divisible."""
    backbone = config.backbone_config
    return backbone.patch_size * backbone.num_windows if config.model_type == "rf_detr" else 32


def _check_resolutions(cfg: CfgNode, divisor: int, config: Any) -> None:
    """Check what all resolutions are divided by, and that RF-DETR finds its queries in patches."""
    for resolution in resolutions(cfg):
        if resolution % divisor:
            raise ConfigError(
                f"TRANSFORMERS.RESOLUTION must be divisible by {divisor} in all its "
                f"MULTI_SCALE_STEPS, got {resolution}"
            )
        if config.model_type != "rf_detr":
            continue
        num_patches = (resolution // config.backbone_config.patch_size) ** 2
        if num_patches < config.num_queries:
            raise ConfigError(
                f"TRANSFORMERS.NUM_QUERIES must be at most {num_patches}, the patches of an image "
                f"of {resolution} pixels, got {config.num_queries}"
            )
