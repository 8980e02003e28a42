# Copyright (c) the d2_memfit developers.
"""A small version of a job: two small images, on the CPU, always with the same weights.

Memory can run out at any allocation of its iterations.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from logging import WARNING
from typing import Any, Optional

import torch
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage
from torch import nn
from torch.optim import Optimizer

from ..common.compat import DispatchMode, default_group_replaced, storage_id
from ..common.errors import MemfitError
from ..common.side_work import no_information
from ..config.settings import NormalizerOptions, Precision, RecoveryOptions
from ..engine.ranks import RankReport
from ..engine.train_loop import AccumulatingTrainer
from ..engine.window import MicroBatch, Window
from ..job import Job, losses_of, resize_image, size_of
from ..memory import storages
from ..planner.stand_ins import cuda_as_cpu

__all__ = ["InjectedTrainer", "Injector", "Patient", "Untested", "Unwell", "as_planned", "smaller"]

_LONGEST_SIDE = 256  # pixels


class Unwell(MemfitError):
    """Something does not work. The message says what."""


class Untested(MemfitError):
    """Something cannot be tested here. The message says why."""


class Injector(DispatchMode):
    """A mode that counts new tensors, and raises an out-of-memory error at some of them.

    Args:
        fail_at: numbers of allocations, from 1.
    """

    def __init__(self, fail_at: Iterable[int] = ()) -> None:
        super().__init__()
        self.fail_at = set(fail_at)
        self.num_allocations = 0
        self._has_failed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        injector: a context for forwards and backwards, such as an :class:`Injector`.
        window_sizes: final sizes of the last window's micro-batches.
    """

    injector: AbstractContextManager[Any] = nullcontext()
    window_sizes: tuple[int, ...] = ()

    def _forward(self, micro_batch: MicroBatch) -> torch.Tensor:
        with self.injector:
            return super()._forward(micro_batch)

    def _backward(self, loss: torch.Tensor, weight: float) -> None:
        with self.injector:
            super()._backward(loss, weight)

    def _vote(self, window: Window, *args: Any) -> list[RankReport]:
        self.window_sizes = tuple(m.num_images for m in window.micro_batches)
        return super()._vote(window, *args)


@contextmanager
def as_planned() -> Iterator[None]:
    """While open, models are called as in a plan: on the only rank, with the CPU as CUDA."""
    with default_group_replaced(None), no_information(WARNING), cuda_as_cpu():
        yield


class Patient:
    """A job that is made small for test iterations, which run in :func:`as_planned`.

    Args:
        job: a job for any device.

    Attributes:
        images: two dataset dicts, or another batch.
        losses: called as ``losses(model, batch)``.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.images: Any = smaller(job.training_batch(2))
        self.losses = partial(losses_of, loss_fn=job.parts.loss_fn)

    def model(self) -> nn.Module:
        """Build a model on the CPU, always with the same weights."""
        seed_all_rng(0)
        return self.job.parts.build_model("cpu").train()

    def batch(self) -> Any:
        return copy.deepcopy(self.images)

    def step(
        self,
        build_optimizer: Callable[[nn.Module], Optimizer],
        micro_batch_size: Optional[int] = None,
        fail_at: tuple[int, ...] = (),
    ) -> tuple[Any, float]:
        """Run an iteration; return the trainer, whose model has gradients, and the loss.

        Args:
            build_optimizer: makes the optimizer of a model.
            micro_batch_size: images in a forward.
            fail_at: numbers of allocations at which memory runs out. Recovery is then on.
        """
        model = self.model()
        with EventStorage() as storage:
            kind = InjectedTrainer if fail_at else AccumulatingTrainer
            trainer: Any = kind(
                model,
                [self.batch()],
                build_optimizer(model),
                precision=Precision("float32", "cpu"),
                micro_batch_size=micro_batch_size,
                recovery=RecoveryOptions() if fail_at else None,
                normalizers=NormalizerOptions("off"),  # another check has tested the losses
                loss_fn=self.job.parts.loss_fn,
            )
            trainer.injector = Injector(fail_at)
            seed_all_rng(0)
            trainer.run_step()
            return trainer, float(storage.latest()["total_loss"][0])


def smaller(batch: Any) -> Any:
    """Shrink large images in lists of dataset dicts; return other batches as they are."""
    if not isinstance(batch, list) or not all(isinstance(d, dict) for d in batch):
        return batch
    factors = [_LONGEST_SIDE / max(*size_of(d), 1) for d in batch]
    return [resize_image(d, f) if f < 1 else dict(d) for d, f in zip(batch, factors)]
