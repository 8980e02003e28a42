# Copyright (c) the d2_memfit developers.
"""Lightning, as its guides say.

- https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html: accumulated gradients,
  and the batch size finder, which is run before the training.
"""

import logging
import os
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from .job import Job


class Module(lightning.LightningModule):
    def __init__(self, job: Job, detector: nn.Module, optimizer: Optimizer) -> None:
        super().__init__()
        self.batch_size = job.batch_size  # the finder changes it
        self.detector = detector
        self._optimizer = optimizer
        self._job = job

    def training_step(self, batch: list[dict[str, Any]]) -> torch.Tensor:
        return sum(self.detector(batch).values())

    def configure_optimizers(self) -> Optimizer:
        return self._optimizer

    def train_dataloader(self) -> DataLoader[Any]:
        return self._job.loader(self.batch_size)


def train(job: Job) -> None:
    module = Module(job, *job.build())
    _trainer(job, job.accumulation_steps).fit(module)


def train_with_batch_size_finder(job: Job) -> None:
    module = Module(job, *job.build())
    tuner = Tuner(_trainer(job, 1))
    tuner.scale_batch_size(module)
    module.batch_size = min(module.batch_size, job.effective_batch)
    _trainer(job, job.effective_batch // module.batch_size).fit(module)


def _trainer(job: Job, accumulation_steps: int) -> lightning.Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    options: dict[str, Any] = dict(devices=ranks, strategy="ddp") if ranks > 1 else dict(devices=1)
    return lightning.Trainer(
        max_epochs=1,
        accumulate_grad_batches=accumulation_steps,
        use_distributed_sampler=False,  # each rank's images are its own already
        default_root_dir=job.output_dir,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
