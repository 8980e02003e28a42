# Copyright (c) the d2_memfit developers.
"""Trainers that run out of memory wherever a test wants it, and show what they did."""

import json
import random
from functools import partial

import numpy as np
import torch
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage
from tiny import parameters

from d2_memfit import AccumulatingTrainer
from d2_memfit.doctor.patient import InjectedTrainer, Injector  # noqa: F401, for tests
from d2_memfit.engine.window import image_names

seed_all = partial(seed_all_rng, 0)


def iterate(trainer, num_iterations=1, first=0):
    """Run iterations like TrainerBase.train; return the event storage."""
    with EventStorage() as storage:
        for trainer.iter in range(first, first + num_iterations):
            storage.iter = trainer.iter
            trainer.run_step()
    return storage


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


def read_record(folder):
    """The out-of-memory errors of a run."""
    return [json.loads(line) for line in (folder / "memfit_oom.jsonl").open()]


def scripted(sizes):
    """In place of ``Cutter.take``: micro-batches of the sizes that a test asks for, then of one."""

    def take(window):
        place = len(window.micro_batches)
        return window.take(sizes[place] if place < len(sizes) else 1, across_batches=False)

    return take


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
    return {
        "parameters": parameters(model),
        "buffers": {name: b.clone() for name, b in model.named_buffers()},
        "numbers": getattr(model, "loss_normalizer", None),
        "optimizer": trainer.optimizer.state_dict(),
        "scaler": trainer.precision.scaler.state_dict(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1:],
        "python": random.getstate(),
        "scalars": scalars(storage),
    }
