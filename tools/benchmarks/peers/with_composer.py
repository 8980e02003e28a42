# Copyright (c) the d2_memfit developers.
"""Composer, as its guides say.

- https://docs.mosaicml.com/projects/composer/en/stable/notes/auto_microbatching.html: a batch of
  the loader is the effective batch, and is cut into microbatches.

``device_train_microbatch_size="auto"``, which makes them smaller when memory runs out, is for GPUs
only: on a CPU Composer raises "Can only use adaptive device_train_microbatch_size on GPU".
"""

from typing import Any, Union

import torch
from composer import ComposerModel, DataSpec, Trainer
from torch import nn

from .job import Job


class Model(ComposerModel):
    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return self.detector(batch)

    def loss(self, outputs: dict[str, torch.Tensor], batch: list[dict[str, Any]]) -> torch.Tensor:
        return torch.as_tensor(sum(outputs.values()))


def train(job: Job) -> None:
    _train(job, job.batch_size)


def train_with_auto_microbatching(job: Job) -> None:
    _train(job, "auto")


def _train(job: Job, microbatch_size: Union[int, str]) -> None:
    detector, optimizer = job.build()
    data = DataSpec(
        job.loader(job.effective_batch), split_batch=_split, get_num_samples_in_batch=len
    )
    Trainer(
        model=Model(detector),
        train_dataloader=data,
        optimizers=optimizer,
        max_duration="1ep",
        seed=0,
        device_train_microbatch_size=microbatch_size,
        device="gpu" if torch.cuda.is_available() else "cpu",
        progress_bar=False,
        log_to_console=False,
    ).fit()


def _split(batch: list[dict[str, Any]], size: Any) -> list[list[dict[str, Any]]]:
    return [batch[i : i + size] for i in range(0, len(batch), size)]
