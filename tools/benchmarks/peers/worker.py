# Copyright (c) the d2_memfit developers.
"""Training of one side in its own process, under a memory limit.

    python -m benchmarks.peers.worker SPEC

SPEC is JSON with the fields of :class:`Spec`. Under torchrun each rank is one such process.
"""

import gc
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from detectron2.utils.events import EventStorage
from torch import nn
from torch.optim import Optimizer

from d2_memfit.memory import enforce_budget, process_memory, return_large_blocks

from ..common import coins
from .job import Job, Journal
from .models import mask_rcnn
from .sides import EVERY, Side

THUMBNAIL = (128, 160)


class Spec(NamedTuple):
    """The training of one process.

    Attributes:
        side: its name.
        sizes: (height, width) of each image, in order, for each rank.
        batch_size, accumulation_steps: as for :class:`Job`.
        output_dir: gets ``journal.RANK.jsonl``, ``initial.pth`` and ``final.pth``.
        budget_gb: the limit; None is no limit.
        extra_gb: instead of a budget, what comes to that which the process has before training.
    """

    side: str
    sizes: list[Any]
    batch_size: int
    accumulation_steps: int
    output_dir: str
    budget_gb: Optional[float] = None
    extra_gb: Optional[float] = None


class Photographs(Sequence[Any]):
    """Images that are made on access, as a loader's are."""

    def __init__(self, sizes: list[Any], sources: dict[tuple[int, ...], Any]) -> None:
        self._sizes = sizes
        self._sources = sources

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: Any) -> Any:
        dicts, mapper = self._sources[tuple(self._sizes[index])]
        return mapper(dicts[index % len(dicts)])


def main(spec: Spec) -> None:
    rank = int(os.environ.get("RANK", "0"))
    side = next(side for side in EVERY if side.name == spec.side)
    output_dir = Path(spec.output_dir)
    journal = Journal(output_dir / f"journal.{rank}.jsonl")
    train = side.load()
    return_large_blocks()
    sizes = spec.sizes[rank]
    with ExitStack() as stack:
        shapes = {*map(tuple, sizes), THUMBNAIL}
        sources = {shape: stack.enter_context(coins(*shape)) for shape in shapes}
        build = Build(side, Photographs([THUMBNAIL], sources)[0])
        build()  # what a process allocates once is there before the limit
        gc.collect()
        data_gb = process_memory().data_bytes / 2**30
        journal.write(event="ready", data_gb=data_gb)
        if spec.extra_gb is not None:
            enforce_budget(data_gb + spec.extra_gb, "cpu")
        elif spec.budget_gb is not None:
            enforce_budget(spec.budget_gb, "cpu")

        def build_and_watch() -> tuple[nn.Module, Optimizer]:
            model, optimizer = build()
            if rank == 0:
                torch.save(model.state_dict(), output_dir / "initial.pth")
            journal.watch(model, optimizer)
            return model, optimizer

        images = Photographs(sizes, sources)
        job = Job(build_and_watch, images, spec.batch_size, spec.accumulation_steps, output_dir)
        job.when_loading.append(journal.begin)
        with EventStorage():
            train(job)
    if rank == 0:
        torch.save(build.model.state_dict(), output_dir / "final.pth")
    journal.write(event="end")


class Build:
    """Makes the model and its optimizer, with momentum from a step on a thumbnail."""

    def __init__(self, side: Side, thumbnail: dict[str, Any]) -> None:
        self._side = side
        self._thumbnail = thumbnail
        self.model: nn.Module = nn.Identity()

    def __call__(self) -> tuple[nn.Module, Optimizer]:
        self.model = nn.Identity()  # frees the last one
        self.model, optimizer = mask_rcnn(learning_rate=1e-3, exact=self._side.techniques)
        with EventStorage():
            sum(self.model([self._thumbnail]).values()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        return self.model, optimizer


if __name__ == "__main__":
    main(Spec(**json.loads(sys.argv[1])))
