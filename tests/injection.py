"""Out-of-memory errors wherever a test wants them, and trainers that show what they did."""

import random

import numpy as np
import torch
from detectron2.utils.events import EventStorage
from tiny import parameters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from d2_memfit import AccumulatingTrainer
from d2_memfit.engine.window import image_names


class Injector(TorchDispatchMode):
    """Counts tensors that come to life while it is open, and raises at some of them.

    Args:
        fail_at: numbers of allocations, from 1.
    """

    def __init__(self, fail_at=()):
        super().__init__()
        self.fail_at = set(fail_at)
        self.num_allocations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {storage_of(t) for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and storage_of(tensor) not in given:
                self.num_allocations += 1
                if self.num_allocations in self.fail_at:
                    raise torch.OutOfMemoryError(f"injected at {self.num_allocations}")
        return result


def storage_of(tensor):
    return tensor.untyped_storage()._cdata


class InjectedTrainer(AccumulatingTrainer):
    """Allocations of its forwards and backwards go through an injector.

    ``window_sizes`` are those of the last window's micro-batches, as they were in the end.
    """

    injector = Injector()
    window_sizes = ()

    def _forward(self, micro_batch):
        with self.injector:
            return super()._forward(micro_batch)

    def _backward(self, loss, weight):
        with self.injector:
            super()._backward(loss, weight)

    def _accumulate(self, window, storage):
        result = super()._accumulate(window, storage)
        self.window_sizes = [m.num_images for m in window.micro_batches]
        return result


class FailingTrainer(AccumulatingTrainer):
    """Runs out of memory in micro-batches for which ``fails(image_ids)`` is true.

    ``phase`` is when, "forward" or "backward"; ``forwards`` are all that ended.
    """

    phase = "forward"

    def __init__(self, *args, fails, **kwargs):
        super().__init__(*args, **kwargs)
        self.fails = fails
        self.forwards = []
        self._current = None

    def _forward(self, micro_batch):
        self._current = micro_batch.data
        if self.phase == "forward":
            self._maybe_fail()
        loss = super()._forward(micro_batch)
        self.forwards.append(image_names(micro_batch.data))
        return loss

    def _backward(self, loss, weight):
        super()._backward(loss, weight)  # it has touched gradients before it fails
        if self.phase == "backward":
            self._maybe_fail()

    def _maybe_fail(self):
        if self.fails([image["image_id"] for image in self._current]):
            raise torch.OutOfMemoryError("CUDA out of memory. injected")


class ScriptedSize:
    """In place of MicroBatchSize: the sizes that a test asks for."""

    def __init__(self, sizes):
        self._sizes = iter(sizes)

    @property
    def images(self):
        return next(self._sizes, 1)

    def end_iteration(self, clean):
        return False

    def state_dict(self):
        return {}


def iterate(trainer, num_iterations=1, first=0):
    """Iterations as TrainerBase.train makes them; returns the event storage."""
    with EventStorage() as storage:
        for trainer.iter in range(first, first + num_iterations):
            storage.iter = trainer.iter
            trainer.run_step()
    return storage


def scalars(storage):
    """What was logged, without times and without our own counts."""
    return {
        name: history.values()
        for name, history in storage.histories().items()
        if not name.startswith("memfit/") and not name.endswith("data_time")
    }


def everything(trainer, storage):
    """All state that a recovery must leave as if it had not been needed."""
    model = trainer.model
    scaler = trainer.precision.scaler
    return {
        "parameters": parameters(model),
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "numbers": getattr(model, "loss_normalizer", None),
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": scaler and scaler.state_dict(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1:],
        "python": random.getstate(),
        "scalars": scalars(storage),
    }


def seed_all(seed=0):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
