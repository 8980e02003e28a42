# Copyright (c) the d2_memfit developers.
"""Detectors of the transformers library as a meta-architecture of Detectron2."""

import re
from collections.abc import Sequence
from typing import Any, Optional

import torch
from detectron2.config import CfgNode, configurable
from detectron2.modeling import META_ARCH_REGISTRY
from detectron2.modeling.postprocessing import sem_seg_postprocess
from detectron2.structures import Instances
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from d2_memfit.errors import ConfigError
from d2_memfit.techniques import find_modules

from .average import averaged_model
from .batch import Labels, images_of, labels_of
from .build import build_transformers_model, load_pretrained
from .config import check_transformers_config
from .data import resolutions
from .families import FAMILIES, Family
from .inference import instances_of_boxes, instances_of_masks
from .losses import losses_by_name

__all__ = ["TransformersDetector"]


@META_ARCH_REGISTRY.register()
class TransformersDetector(nn.Module):
    """A detector of transformers with Detectron2's interface.

    It takes dataset dicts and returns a dict of losses; in evaluation it returns a list of
    ``{"instances": Instances}``. Modules and losses are those of transformers.

    Args:
        model: the transformers model.
        family: the properties of its family.
        pixel_mean, pixel_std: of the three channels, for values from 0 to 255.
        resolutions: sides of the squares that images are resized to; none if they keep their shape.
        detections_per_image: largest number of detections.
        ema_decay, ema_tau: see TRANSFORMERS.EMA_DECAY and EMA_TAU.

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

    @configurable  # type: ignore[untyped-decorator]
    def __init__(
        self,
        model: nn.Module,
        family: Family,
        pixel_mean: list[float],
        pixel_std: list[float],
        resolutions: list[int],
        detections_per_image: int,
        ema_decay: float = 0.0,
        ema_tau: float = 100.0,
    ) -> None:
        super().__init__()
        self.model = model
        self.family = family
        self.resolutions = resolutions
        self.size_divisibility = _divisor(model.config)
        self.detections_per_image = detections_per_image
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean).view(-1, 1, 1), False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std).view(-1, 1, 1), False)
        self.ema = averaged_model(model, ema_decay, ema_tau) if ema_decay else None

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        check_transformers_config(cfg)
        model = build_transformers_model(cfg)
        _check_resolutions(cfg, _divisor(model.config))
        _check_queries(cfg, model.config)
        _choose_trained(model)
        frozen = cfg.TRANSFORMERS.FREEZE
        for module in find_modules(model, "TRANSFORMERS.FREEZE", frozen) if frozen else ():
            module.requires_grad_(False)
        return {
            "model": model,
            "family": FAMILIES[cfg.TRANSFORMERS.TYPE],
            "pixel_mean": cfg.MODEL.PIXEL_MEAN,
            "pixel_std": cfg.MODEL.PIXEL_STD,
            "resolutions": resolutions(cfg),
            "detections_per_image": cfg.TEST.DETECTIONS_PER_IMAGE,
            "ema_decay": cfg.TRANSFORMERS.EMA_DECAY,
            "ema_tau": cfg.TRANSFORMERS.EMA_TAU,
        }

    @property
    def device(self) -> torch.device:
        return self.pixel_mean.device

    @property
    def has_masks(self) -> bool:
        return self.family.mask_class == type(self.model).__name__

    def forward(self, batch: list[dict[str, Any]]) -> Any:
        images = images_of(
            batch, self.pixel_mean, self.pixel_std, self.resolutions, self.size_divisibility
        )
        mask = {"pixel_mask": images.mask} if self.family.takes_mask else {}
        if self.training:
            objects = [d["instances"] for d in batch]
            labels = labels_of(objects, images, self.family.takes_mask, self.has_masks)
            return self._losses(images.pixels, labels, mask)
        output = self.best_model(images.pixels, **mask)
        height, width = images.pixels.shape[-2:]
        return [
            {"instances": self._instances(output, i, d, (size[0] / height, size[1] / width))}
            for i, (d, size) in enumerate(zip(batch, images.sizes))
        ]

    def _losses(
        self, pixels: Tensor, labels: list[Labels], mask: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        inputs: dict[str, Any] = {"pixel_values": pixels, **mask, "labels": labels}
        if self.family.has_own_criterion:
            del inputs["labels"]
            inputs["class_labels"] = [of_image["class_labels"] for of_image in labels]
            inputs["mask_labels"] = [of_image["masks"].float() for of_image in labels]
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
        # Layers with adapters (MEMFIT.FINE_TUNE.LORA_RANK) have their merged weights, too.
        plain = {
            name: value
            for name, value in model.state_dict().items()
            if ".base_layer." not in name and ".lora_" not in name
        }
        model.save_pretrained(folder, state_dict=plain)

    def _instances(
        self, output: Any, index: int, data: dict[str, Any], shown: tuple[float, float]
    ) -> Instances:
        size = (
            data.get("height", data["image"].shape[-2]),
            data.get("width", data["image"].shape[-1]),
        )
        num = self.detections_per_image
        if self.family.box_class is None:
            return instances_of_masks(output, index, shown, size, num, sem_seg_postprocess)
        found = instances_of_boxes(output, index, shown, size, num, sem_seg_postprocess)
        if not self.family.takes_mask:  # boxes are relative to the frame
            found.pred_boxes.scale(1 / shown[1], 1 / shown[0])
            found.pred_boxes.clip(size)
        return found


def _choose_trained(model: nn.Module) -> None:
    """Correct which parameters transformers trains."""
    for name, parameter in model.named_parameters():
        if name.endswith("embeddings.mask_token"):  # used in DINOv2's pretraining, not in a forward
            parameter.requires_grad_(False)
        # Deformable DETR means to freeze a ResNet's stem and first stage. It looks for the others
        # as "stage.1", which are named "stages.1", and freezes them too.
        elif re.search(r"backbone.*\.stages\.[1-3]\.", name):
            parameter.requires_grad_(True)


def _divisor(config: Any) -> int:
    """Number by which height and width must be divisible."""
    backbone = getattr(config, "backbone_config", None) or config
    patch = getattr(backbone, "patch_size", 0)
    if config.model_type in ("rf_detr", "eomt"):
        return int(patch * getattr(backbone, "num_windows", 1))
    return 32


def _check_resolutions(cfg: CfgNode, divisor: int) -> None:
    if not cfg.TRANSFORMERS.RESOLUTION and cfg.TRANSFORMERS.TYPE == "eomt":
        raise ConfigError("TRANSFORMERS.RESOLUTION must be a positive integer: EoMT has one size")
    for resolution in resolutions(cfg):
        if resolution % divisor:
            raise ConfigError(
                f"TRANSFORMERS.RESOLUTION {cfg.TRANSFORMERS.RESOLUTION} with MULTI_SCALE_STEPS "
                f"{cfg.TRANSFORMERS.MULTI_SCALE_STEPS} x {cfg.TRANSFORMERS.MULTI_SCALE_STRIDE} has "
                f"{resolution} pixels, which must be divisible by {divisor}"
            )


def _check_queries(cfg: CfgNode, config: Any) -> None:
    """Check the number of queries: RF-DETR chooses them from the patches of an image."""
    smallest = min(resolutions(cfg), default=0)
    if config.model_type != "rf_detr" or not smallest:
        return
    num_patches = (smallest // config.backbone_config.patch_size) ** 2
    if num_patches < config.num_queries:
        raise ConfigError(
            f"TRANSFORMERS.NUM_QUERIES must be at most {num_patches}, the patches of an image of "
            f"{smallest} pixels, got {config.num_queries}"
        )
