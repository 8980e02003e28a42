#!/usr/bin/env python3
# Copyright (c) the d2_memfit developers.
"""Train a small detector that also learns from the features of a larger, trained one.

    python projects/Distillation/train_distillation.py --config-file STUDENT.yaml \
        --coco my_train train.json images/ --coco my_val val.json images/ \
        DISTILLATION.TEACHER_CONFIG output/teacher/config.yaml \
        DISTILLATION.TEACHER_WEIGHTS output/teacher/model_final.pth [KEY VALUE ...]

The method is channel-wise knowledge distillation (Shu et al., ICCV 2021, arXiv:2011.13256) on the
levels of FPN. The teacher's backbone runs in each forward, without gradients. It is a part of the
model, so estimates, plans and budgets count its memory. Checkpoints have the student alone.
"""

from typing import Any

import torch
import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.modeling import META_ARCH_REGISTRY, GeneralizedRCNN, RetinaNet, build_model
from torch import nn

from d2_memfit.cli.train import Trainer as MemfitTrainer
from d2_memfit.cli.train import run_script
from d2_memfit.config import load_cfg
from d2_memfit.errors import CheckpointError, ConfigError
from d2_memfit.inference import load_whole_model

__all__ = ["Distilled", "Trainer", "add_distillation_config", "channel_wise_loss"]


def add_distillation_config(cfg: CfgNode) -> None:
    """Add the keys of distillation."""
    node = cfg.DISTILLATION = CfgNode()
    # Config of the teacher: a file, or a name in the model zoo.
    node.TEACHER_CONFIG = ""
    # Trained weights of the teacher. Estimates and plans do not need them.
    node.TEACHER_WEIGHTS = ""
    # The loss of each level is a mean over channels and images; levels are averaged.
    node.LOSS_WEIGHT = 10.0
    # The softmax over an image's positions is softer with a higher temperature.
    node.TEMPERATURE = 1.0


def channel_wise_loss(
    student: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Channel-wise distillation (arXiv:2011.13256, equation 4), a mean over channels.

    Args:
        student: features [channels, height, width] of one image.
        teacher: features of the same shape.
        temperature: divides the features.
    """
    channels = student.shape[0]
    logs = [
        f.float().reshape(channels, -1).div(temperature).log_softmax(1) for f in (student, teacher)
    ]
    divergence = F.kl_div(logs[0], logs[1], reduction="sum", log_target=True)
    return divergence * temperature**2 / channels


class Distilled(nn.Module):
    """A mixin for meta-architectures: in training, ``loss_distillation`` comes to the losses.

    Args:
        cfg: the student's, with the keys of :func:`add_distillation_config`.

    Raises:
        ConfigError: teacher and student do not go together.
    """

    backbone: nn.Module

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__(cfg)
        teacher_cfg = _teacher_cfg(cfg)
        teacher: Any = build_model(teacher_cfg).requires_grad_(False)
        for name, _ in list(teacher.named_children()):
            if name != "backbone":
                delattr(teacher, name)  # heads, which are not needed
        self.teacher = teacher
        self._flips = cfg.INPUT.FORMAT != teacher_cfg.INPUT.FORMAT  # BGR and RGB
        student: Any = self
        shapes = [model.backbone.output_shape() for model in (student, teacher)]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                "the teacher's features must have the student's levels and channels: set the "
                f"student's MODEL.FPN.OUT_CHANNELS to {teacher_cfg.MODEL.FPN.OUT_CHANNELS}, got "
                f"{cfg.MODEL.FPN.OUT_CHANNELS}"
            )
        self._strides = {level: shape.stride for level, shape in shapes[0].items()}
        self._weight = cfg.DISTILLATION.LOSS_WEIGHT
        self._temperature = cfg.DISTILLATION.TEMPERATURE
        self.register_state_dict_post_hook(_leave_out_teacher)
        self.register_load_state_dict_post_hook(_miss_no_teacher)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, batched_inputs: list[dict[str, Any]]) -> Any:
        if not self.training:
            return super().forward(batched_inputs)
        targets = self._targets(batched_inputs)  # first, while there are no activations
        features: dict[str, torch.Tensor] = {}

        def keep(_module: nn.Module, _inputs: Any, outputs: dict[str, torch.Tensor]) -> None:
            features.update(outputs)

        with self.backbone.register_forward_hook(keep):
            losses = super().forward(batched_inputs)
        terms = []
        for level, stride in self._strides.items():
            for number, image in enumerate(batched_inputs):
                # Without padding, which depends on the other images of the micro-batch.
                height, width = (-(-side // stride) for side in image["image"].shape[-2:])
                own = (number, slice(None), slice(height), slice(width))
                student = features[level][own]
                teacher = targets[level][own]
                terms.append(channel_wise_loss(student, teacher, self._temperature))
        losses["loss_distillation"] = self._weight * torch.stack(terms).mean()
        return losses

    @torch.no_grad()
    def _targets(self, batched_inputs: list[dict[str, Any]]) -> Any:
        """The teacher's features. It normalises pixels in its own way."""
        if self._flips:
            batched_inputs = [{"image": image["image"].flip(0)} for image in batched_inputs]
        teacher: Any = self.teacher
        return teacher.backbone(teacher.preprocess_image(batched_inputs).tensor)


def _leave_out_teacher(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in [name for name in state if name.startswith(f"{prefix}teacher.")]:
        del state[name]


def _miss_no_teacher(module: nn.Module, incompatible: Any) -> None:
    missing = incompatible.missing_keys
    missing[:] = [name for name in missing if not name.startswith("teacher.")]


@META_ARCH_REGISTRY.register()
class DistilledRCNN(Distilled, GeneralizedRCNN):
    """Faster, Mask, Keypoint and Cascade R-CNN."""


@META_ARCH_REGISTRY.register()
class DistilledRetinaNet(Distilled, RetinaNet):
    """RetinaNet."""


_DISTILLED = {"GeneralizedRCNN": "DistilledRCNN", "RetinaNet": "DistilledRetinaNet"}


def _teacher_cfg(cfg: CfgNode) -> CfgNode:
    file = cfg.DISTILLATION.TEACHER_CONFIG
    if not file:
        raise ConfigError(
            "DISTILLATION.TEACHER_CONFIG is empty: name the config of a trained model"
        )
    return load_cfg(file, ["MODEL.DEVICE", cfg.MODEL.DEVICE], [add_distillation_config])


class Trainer(MemfitTrainer):
    """Trains the student of a config, with its meta-architecture replaced by a distilled one."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        name = cfg.MODEL.META_ARCHITECTURE
        if name not in _DISTILLED:
            raise ConfigError(
                f"MODEL.META_ARCHITECTURE must be {' or '.join(_DISTILLED)}, got {name}"
            )
        distilled = cfg.clone()
        distilled.defrost()
        distilled.MODEL.META_ARCHITECTURE = _DISTILLED[name]
        model: nn.Module = super().build_model(distilled)
        return model

    def resume_or_load(self, resume: bool = True) -> None:
        weights = self.cfg.DISTILLATION.TEACHER_WEIGHTS
        if not weights:
            raise ConfigError(
                "DISTILLATION.TEACHER_WEIGHTS is empty: name the weights of a trained model"
            )
        model: Any = self.model.module if hasattr(self.model, "module") else self.model
        try:
            load_whole_model(model.teacher, weights)
        except CheckpointError as e:
            raise CheckpointError(
                f"DISTILLATION.TEACHER_WEIGHTS do not fit DISTILLATION.TEACHER_CONFIG: {e}"
            ) from e
        super().resume_or_load(resume)


if __name__ == "__main__":
    run_script(Trainer, [add_distillation_config], __doc__)
