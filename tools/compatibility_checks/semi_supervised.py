# Copyright (c) the d2_memfit developers.
"""Unbiased Teacher with d2_memfit: its losses as a function, its teacher once per iteration."""

from typing import Any

import torch
import torch.distributed as dist
from detectron2.config import CfgNode
from torch import nn

from d2_memfit import MemfitMixin

from .project import load

__all__ = ["make_trainer", "synchronize"]


def make_trainer() -> type:
    """Make a trainer class. The project must be importable by then."""
    UBTeacherTrainer = load("train_net:UBTeacherTrainer")

    class Trainer(MemfitMixin, UBTeacherTrainer):  # type: ignore[misc,valid-type]
        def __init__(self, cfg: CfgNode) -> None:
            super().__init__(cfg)
            self._trainer.loss_fn = self.losses

        def losses(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
            keys = self.cfg.SEMISUPNET
            label_q, label_k, unlabel_q, unlabel_k = batch
            losses, *_ = model(label_q + label_k, branch="supervised")
            losses = {k: v for k, v in losses.items() if k.startswith("loss")}
            if self.iter >= keys.BURN_UP_STEP:
                with torch.no_grad():
                    unlabeled = self.remove_label(unlabel_k)
                    boxes = self.model_teacher(unlabeled, branch="unsup_data_weak")[2]
                threshold = keys.BBOX_THRESHOLD
                labels, _ = self.process_pseudo_label(boxes, threshold, "roih", "thresholding")
                pseudo, *_ = model(self.add_label(unlabel_q, labels), branch="supervised")
                for name in ("loss_cls", "loss_rpn_cls"):
                    losses[f"{name}_pseudo"] = keys.UNSUP_LOSS_WEIGHT * pseudo[name]
            return losses

        def run_step_full_semisup(self) -> None:
            begin = self.cfg.SEMISUPNET.BURN_UP_STEP
            if self.iter >= begin:
                rate = self.cfg.SEMISUPNET.EMA_KEEP_RATE if self.iter > begin else 0.0
                self._update_teacher_model(keep_rate=rate)
            self._trainer.iter = self.iter
            self._trainer.run_step()

    return Trainer


def synchronize(model: nn.parallel.DistributedDataParallel) -> None:
    """Give all ranks the weights of rank 0, as a method did that PyTorch has removed."""
    for tensor in model.module.state_dict().values():
        dist.broadcast(tensor, 0)
