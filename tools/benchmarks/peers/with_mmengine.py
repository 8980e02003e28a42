# Copyright (c) the d2_memfit developers.
"""mmengine, as its guides say.

- https://mmengine.readthedocs.io/en/latest/common_usage/save_gpu_memory.html: accumulation, and
  checkpointing of named modules
- https://mmengine.readthedocs.io/en/latest/get_started/15_minutes.html: model and runner
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn
from torch.optim import Optimizer

from .job import Job


class Model(BaseModel):
    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, *images: dict[str, Any], mode: str) -> dict[str, torch.Tensor]:
        return self.detector(list(images))


def train(job: Job) -> None:
    _train(job, *job.build(), cfg={})


def train_with_checkpointing(job: Job) -> None:
    detector, optimizer = job.build()
    # Not res3: it is behind frozen stages, and PyTorch's reentrant checkpointing, which this is,
    # gives no gradient to a module whose input needs none.
    names = [f"detector.backbone.bottom_up.{stage}" for stage in ("res4", "res5")]
    _train(job, detector, optimizer, cfg=dict(activation_checkpointing=names))
    for name in names:  # a second run would wrap the forward that mmengine leaves here
        del detector.get_submodule(name.removeprefix("detector.")).forward


def _train(job: Job, detector: nn.Module, optimizer: Optimizer, cfg: dict[str, Any]) -> None:
    is_distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if is_distributed:
        # Its launcher and its default wrapper would ask for GPUs.
        dist.init_process_group("gloo")
        wrapper_cfg = dict(type="MMDistributedDataParallel", device_ids=None)
        cfg = dict(cfg, model_wrapper_cfg=wrapper_cfg)
    wrapper = dict(
        type="OptimWrapper", optimizer=optimizer, accumulative_counts=job.accumulation_steps
    )
    runner = Runner(
        model=Model(detector),
        work_dir=str(job.output_dir),
        train_dataloader=job.loader(),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=wrapper,
        default_hooks=dict(checkpoint=None),
        randomness=dict(seed=0),
        experiment_name=f"race_{next(_numbers)}",
        log_level="ERROR",
        launcher="pytorch" if is_distributed else "none",
        cfg=cfg,
    )
    runner.train()


_numbers = iter(range(10**9))  # each runner of a process must have a name of its own
