# Copyright (c) the d2_memfit developers.
"""A small version of a job: two small images, on the CPU, always with the same weights."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Optional

import torch
from detectron2.structures import Instances
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage
from torch import nn

from ..common.side_work import alone, no_information
from ..config.precision import Precision
from ..config.settings import RecoveryOptions
from ..engine import AccumulatingTrainer
from ..engine.loss_check import LossReport
from ..job import Job, losses_of, resize_image, size_of
from ..planner.stand_ins import cuda_as_cpu
from .injection import InjectedTrainer, Injector

__all__ = ["Patient", "Untested", "Unwell", "smaller"]

_LONGEST_SIDE = 256  # pixels


class Unwell(Exception):
    """Something does not work. The message says what."""


class Untested(Exception):
    """Something cannot be tested here. The message says why."""


class Patient:
    """A job that is made small for test iterations.

    Args:
        job: a job for any device.

    Attributes:
        images: two dataset dicts. The second has fewer objects.
        crowded: the same with all objects.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.crowded: Any = smaller(job.training_batch(2))
        self.images: Any = _with_fewer_objects(self.crowded)
        self.report: Optional[LossReport] = None  # of its losses, which need one check
        self._counts: dict[str, Any] = {}  # of the iterations, which need another one

    def model(self) -> nn.Module:
        """Build a model on the CPU, always with the same weights."""
        seed_all_rng(0)
        with _as_planned():
            return self.job.parts.build_model("cpu").train()

    def batch(self) -> Any:
        return copy.deepcopy(self.images)

    def losses(self, model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor]:
        return losses_of(model, batch, self.job.parts.loss_fn)

    def step(
        self,
        micro_batch_size: Optional[int] = None,
        fail_at: tuple[int, ...] = (),
        seed: int = 0,
        with_optimizer: bool = False,
        images: Any = None,
    ) -> tuple[list[torch.Tensor], float, Any]:
        """Run an iteration; return gradients or weights, the loss, and the trainer.

        Weights are returned after a step of the job's optimizer.

        Args:
            micro_batch_size: images in a forward.
            fail_at: numbers of allocations at which memory runs out. Recovery is then on.
            with_optimizer: whether the job's optimizer steps.
            images: a batch to use instead of the two images.
        """
        model = self.model()
        with _as_planned():
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
            if with_optimizer:
                optimizer = self.job.parts.build_optimizer(model)
            kind = InjectedTrainer if fail_at else AccumulatingTrainer
            trainer = kind(
                model,
                [self.batch() if images is None else images],
                optimizer,
                precision=Precision("fp32", "cpu"),
                micro_batch_size=micro_batch_size,
                recovery=RecoveryOptions() if fail_at else None,
                loss_fn=self.job.parts.loss_fn,
            )
            if fail_at:
                trainer.injector = Injector(fail_at)
            trainer.counts.load_state_dict(self._counts)
            seed_all_rng(seed)
            with EventStorage() as storage:
                trainer.run_step()
                loss = float(storage.latest()["total_loss"][0])
            self._counts = trainer.counts.state_dict() or self._counts
        if with_optimizer:
            return [p.detach() for p in model.parameters()], loss, trainer
        return [p.grad for p in model.parameters() if p.grad is not None], loss, trainer

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function as models are called here: as the only rank, with the CPU as CUDA."""
        with _as_planned(), EventStorage():
            return function(*args)


@contextmanager
def _as_planned() -> Iterator[None]:
    with alone(), no_information(logging.WARNING), cuda_as_cpu():
        yield


def _with_fewer_objects(batch: Any) -> Any:
    """The batch, of which each image has fewer objects than the one before."""
    if not isinstance(batch, list) or not all(isinstance(d, dict) for d in batch):
        return batch
    result = [dict(d) for d in batch]
    for i, d in enumerate(result):
        instances = d.get("instances")
        if isinstance(instances, Instances) and len(instances) > 1:
            d["instances"] = instances[: max(len(instances) // (i + 1) ** 2 // 5, 1)]
    return result


def smaller(batch: Any) -> Any:
    """Shrink large images in lists of dataset dicts; return other batches as they are."""
    if not isinstance(batch, list) or not all(isinstance(d, dict) for d in batch):
        return batch
    result = []
    for d in batch:
        longest = max(size_of(d))
        factor = min(1, _LONGEST_SIDE / longest) if longest else 1
        result.append(resize_image(d, factor) if "image" in d and factor < 1 else dict(d))
    return result
