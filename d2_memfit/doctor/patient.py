# Copyright (c) the d2_memfit developers.
"""A small version of a job: two small images, on the CPU, always with the same weights.

Memory can run out at any allocation of its iterations.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Optional

import torch
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage
from torch import nn

from ..common.compat import TorchDispatchMode, default_group_replaced, storage_id
from ..common.errors import MemfitError
from ..common.side_work import no_information
from ..config.settings import NormalizerOptions, Precision, RecoveryOptions
from ..engine.ranks import RankReport
from ..engine.train_loop import AccumulatingTrainer
from ..engine.window import MicroBatch, Window
from ..job import Job, losses_of, resize_image, size_of
from ..memory import storages
from ..planner.stand_ins import cuda_as_cpu

__all__ = ["InjectedTrainer", "Injector", "Patient", "Untested", "Unwell", "smaller"]

_LONGEST_SIDE = 256  # pixels


class Unwell(MemfitError):
    """Something does not work. The message says what."""


class Untested(MemfitError):
    """Something cannot be tested here. The message says why."""


class Injector(TorchDispatchMode):
    """A mode that counts new tensors, and raises an out-of-memory error at some of them.

    Args:
        fail_at: numbers of allocations, from 1.
    """

    def __init__(self, fail_at: Iterable[int] = ()) -> None:
        super().__init__()
        self.fail_at = set(fail_at)
        self.num_allocations = 0
        self._has_failed = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as for TensorMeter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_id(storage) for storage in storages((args, kwargs))}
        for storage in storages(result):
            if storage_id(storage) not in given:
                self.num_allocations += 1
                if self.num_allocations in self.fail_at:
                    self._has_failed = True
                    raise torch.OutOfMemoryError(f"injected at {self.num_allocations}")
        return result

    def __exit__(self, kind: Any, error: Optional[BaseException], traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        # TorchScript keeps the text of an allocator's error, and nothing of one from Python.
        if self._has_failed and "TorchScript" in str(error):
            raise torch.OutOfMemoryError(f"injected at {self.num_allocations}") from error


class InjectedTrainer(AccumulatingTrainer):
    """A trainer whose allocations in forward and backward go through an injector.

    Attributes:
        window_sizes: final sizes of the last window's micro-batches.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.injector = Injector()
        self.window_sizes: tuple[int, ...] = ()

    def _forward(self, micro_batch: MicroBatch) -> torch.Tensor:
        with self.injector:
            return super()._forward(micro_batch)

    def _backward(self, loss: torch.Tensor, weight: float) -> None:
        with self.injector:
            super()._backward(loss, weight)

    def _vote(self, window: Window, *args: Any) -> list[RankReport]:
        self.window_sizes = tuple(m.num_images for m in window.micro_batches)
        return super()._vote(window, *args)


class Patient:
    """A job that is made small for test iterations.

    Args:
        job: a job for any device.

    Attributes:
        images: two dataset dicts, or another batch.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.images: Any = smaller(job.training_batch(2))

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
        with_optimizer: bool = False,
    ) -> tuple[list[torch.Tensor], float, Any]:
        """Run an iteration; return gradients or weights, the loss, and the trainer.

        Args:
            micro_batch_size: images in a forward.
            fail_at: numbers of allocations at which memory runs out. Recovery is then on.
            with_optimizer: whether the job's optimizer steps; the weights are returned then.
        """
        model = self.model()
        with _as_planned(), EventStorage() as storage:
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.0)
            if with_optimizer:
                optimizer = self.job.parts.build_optimizer(model)
            kind = InjectedTrainer if fail_at else AccumulatingTrainer
            trainer = kind(
                model,
                [self.batch()],
                optimizer,
                precision=Precision("float32", "cpu"),
                micro_batch_size=micro_batch_size,
                recovery=RecoveryOptions() if fail_at else None,
                normalizers=NormalizerOptions("off"),  # another check has tested the losses
                loss_fn=self.job.parts.loss_fn,
            )
            if isinstance(trainer, InjectedTrainer):
                trainer.injector = Injector(fail_at)
            seed_all_rng(0)
            trainer.run_step()
            loss = float(storage.latest()["total_loss"][0])
        if with_optimizer:
            return [p.detach() for p in model.parameters()], loss, trainer
        return [p.grad for p in model.parameters() if p.grad is not None], loss, trainer

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function as models are called here: as the only rank, with the CPU as CUDA."""
        with _as_planned(), EventStorage():
            return function(*args)


@contextmanager
def _as_planned() -> Iterator[None]:
    with default_group_replaced(None), no_information(logging.WARNING), cuda_as_cpu():
        yield


def smaller(batch: Any) -> Any:
    """Shrink large images in lists of dataset dicts; return other batches as they are."""
    if not isinstance(batch, list) or not all(isinstance(d, dict) for d in batch):
        return batch
    factors = [_LONGEST_SIDE / max(*size_of(d), 1) for d in batch]
    return [resize_image(d, f) if f < 1 else dict(d) for d, f in zip(batch, factors)]
