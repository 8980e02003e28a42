# Copyright (c) the d2_memfit developers.
"""Accelerate, as its guides say.

- https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation
- https://huggingface.co/docs/accelerate/usage_guides/memory, whose ``find_executable_batch_size``
  runs the whole training anew with a batch of nine tenths when memory runs out. The effective batch
  is kept as in examples/by_feature/automatic_gradient_accumulation.py of its repository.
"""

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import find_executable_batch_size

from .job import Job


def train(job: Job) -> None:
    _train(job, _accelerator(job.accumulation_steps), job.batch_size)


def train_with_batch_size_finder(job: Job) -> None:
    accelerator = _accelerator(job.accumulation_steps)

    @find_executable_batch_size(starting_batch_size=job.batch_size)  # type: ignore[untyped-decorator]
    def inner_training_loop(batch_size: int) -> None:
        accelerator.free_memory()
        accelerator.gradient_accumulation_steps = job.effective_batch // batch_size
        _train(job, accelerator, batch_size)

    inner_training_loop()


def _accelerator(accumulation_steps: int) -> Accelerator:
    cpu = not torch.cuda.is_available()
    return Accelerator(gradient_accumulation_steps=accumulation_steps, cpu=cpu)


def _train(job: Job, accelerator: Accelerator, batch_size: int) -> None:
    model, optimizer = accelerator.prepare(*job.build())
    # As `prepare` does, but each rank's images are its own already.
    loader = prepare_data_loader(job.loader(batch_size), num_processes=1, process_index=0)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = sum(model(batch).values())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
