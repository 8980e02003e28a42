# Copyright (c) the d2_memfit developers.
"""Unbiased Teacher's iteration as a model that maps a batch to losses, for dry runs.

A batch has IMG_PER_BATCH_LABEL images twice, strongly and weakly augmented, then
IMG_PER_BATCH_UNLABEL images twice. Sizes are those of Detectron2's mapper: the project augments
only colours further. Pseudo-labels are taken to be as many as labels.
"""

from typing import Any

import torch
from compatibility_checks.project import load
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer
from torch import nn

__all__ = ["Trainer"]


class TeacherAndStudent(nn.Module):
    """The two models, and the losses of ``run_step_full_semisup``.

    Args:
        labelled: the part of a batch's images that has labels.
        burns_in: whether the run ends before the teacher is used.
    """

    def __init__(
        self, student: nn.Module, teacher: nn.Module, labelled: float, burns_in: bool
    ) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False)
        self.labelled, self.burns_in = labelled, burns_in

    def forward(self, batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        start = round(self.labelled * len(batch))
        middle = (start + len(batch)) // 2
        losses = self._losses(batch[:start])
        if not self.burns_in:
            with torch.no_grad():
                self.teacher(batch[middle:], branch="unsup_data_weak")
            pseudo = self._losses(batch[start:middle])
            losses.update({f"{name}_pseudo": loss for name, loss in pseudo.items()})
        return losses

    def _losses(self, batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        losses = self.student(batch, branch="supervised")[0]
        return {name: loss for name, loss in losses.items() if name.startswith("loss")}


class Trainer(DefaultTrainer):
    """Detectron2's trainer with both models."""

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        load("train_net:add_ubteacher_config")  # registers the models
        labelled, unlabelled = cfg.SOLVER.IMG_PER_BATCH_LABEL, cfg.SOLVER.IMG_PER_BATCH_UNLABEL
        return TeacherAndStudent(
            super().build_model(cfg),
            super().build_model(cfg),
            labelled / (labelled + unlabelled),
            cfg.SEMISUPNET.BURN_UP_STEP >= cfg.SOLVER.MAX_ITER,
        )
