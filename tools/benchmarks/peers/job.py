# Copyright (c) the d2_memfit developers.
"""The job that each side of the race trains, and the observation of it."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Job:
    """A model, an optimizer, and images for one pass, in order.

    Args:
        build: makes the model and its optimizer.
        images: dataset dicts for Detectron2's models; may be made on access.
        batch_size: images in a batch of the loader.
        accumulation_steps: batches behind one optimizer step.
        output_dir: folder in which a side may write.
    """

    def __init__(
        self,
        build: Callable[[], tuple[nn.Module, Optimizer]],
        images: Sequence[dict[str, Any]],
        batch_size: int,
        accumulation_steps: int,
        output_dir: Path,
    ) -> None:
        self.build = build
        self.batch_size = batch_size
        self.accumulation_steps = accumulation_steps
        self.output_dir = output_dir
        self._images = images
        self.when_loading: list[Callable[[], None]] = []  # called when the images start again

    @property
    def effective_batch(self) -> int:
        return self.batch_size * self.accumulation_steps

    def num_batches(self) -> int:
        return -(-len(self._images) // self.batch_size)

    def loader(self, batch_size: Optional[int] = None) -> DataLoader[Any]:
        """All images, in order; the last batch may have fewer."""
        images = _Images(self)
        # Each rank has images of its own. Composer wants a distributed sampler on several ranks.
        sampler: DistributedSampler[Any] = DistributedSampler(
            images, num_replicas=1, rank=0, shuffle=False
        )
        size = self.batch_size if batch_size is None else batch_size
        return DataLoader(images, size, sampler=sampler, collate_fn=_as_list)


class _Images(Dataset[Any]):
    def __init__(self, job: Job) -> None:
        self._job = job

    def __len__(self) -> int:
        return len(self._job._images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 0:
            for call in self._job.when_loading:
                call()
        return self._job._images[index]


def _as_list(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return batch


class Stopwatch:
    """Seconds from the first requested image to the end of the last optimizer step.

    Work before and after, such as the setup of a trainer, does not count.
    """

    def __init__(self, job: Job, optimizer: Optimizer) -> None:
        self.seconds = 0.0
        self._start = 0.0
        job.when_loading.append(self._begin)
        optimizer.register_step_post_hook(self._end)

    def _begin(self) -> None:
        self._start = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start


class StepGradients:
    """Records the gradient of each optimizer step as one vector."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.steps: list[torch.Tensor] = []
        # After the step, because Lightning runs the last backward within it; a step leaves the
        # gradients as they are.
        self._hook = optimizer.register_step_post_hook(self._keep)

    def _keep(self, optimizer: Optimizer, *_: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.steps.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]))

    def stop(self) -> None:
        self._hook.remove()


class Journal:
    """Records, line by line, the images of each optimizer step.

    An image counts from the end of its backward. Written lines stay when the process is killed.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")
        self._done: set[int] = set()  # ids of images since the last step

    def begin(self) -> None:
        self._done.clear()
        self.write(event="begin")

    def watch(self, model: nn.Module, optimizer: Optimizer) -> None:
        model.register_forward_hook(self._after_forward)
        optimizer.register_step_post_hook(self._after_step)

    def _after_forward(
        self, model: nn.Module, args: tuple[Any, ...], losses: dict[str, Any]
    ) -> None:
        images = [image["image_id"] for image in args[0]]

        def when_backward_begins(gradient: torch.Tensor) -> None:
            # PyTorch calls it at the end of this backward, if that does not fail.
            Variable._execution_engine.queue_callback(lambda: self._done.update(images))

        next(iter(losses.values())).register_hook(when_backward_begins)

    def _after_step(self, *_: object) -> None:
        self.write(event="step", images=sorted(self._done))
        self._done.clear()

    def write(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()
