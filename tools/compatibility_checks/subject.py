# Copyright (c) the d2_memfit developers.
"""The training of a project, alone and with d2_memfit, in one call each."""

import copy
import importlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
from detectron2.utils.events import EventStorage
from torch import nn

from d2_memfit import Job
from d2_memfit.measure.injection import seed_all

from .project import Project

__all__ = ["Outcome", "Parts", "Replay", "Subject", "make_subject", "recorded_losses"]

NUM_ITERATIONS = 2
FULL_SIZE: dict[str, Any] = {"image_size": (480, 640)}


@dataclass
class Outcome:
    """The results of a run.

    Attributes:
        losses: total loss of each iteration.
        state: states of model and optimizer in one dict.
    """

    losses: list[float]
    state: dict[str, Any] = field(default_factory=dict)


@dataclass
class Parts:
    """Model and optimizer, made as the project makes them."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: Any


class Replay:
    """A loader that repeats given batches."""

    def __init__(self, batches: Sequence[Any], start: int = 0) -> None:
        self._batches = batches
        self._start = start
        self.dataset = range(len(batches))

    def __iter__(self) -> Iterator[Any]:
        for i in itertools.count(self._start):
            yield copy.deepcopy(self._batches[i % len(self._batches)])


class Subject:
    """A project on a small dataset.

    Args:
        project: its description; its modules can be imported.
        folder: folder of all trees.
        scratch: folder for the output of runs.
    """

    def __init__(self, project: Project, folder: Path, scratch: Path) -> None:
        self.project = project
        self.tree = folder / project.tree
        self.scratch = scratch
        self.outcomes: Optional[tuple[Outcome, Outcome]] = None  # plain, and with d2_memfit

    def run(
        self,
        settings: Mapping[str, Any] = {},
        batches: Optional[Sequence[Any]] = None,
        num_iterations: int = NUM_ITERATIONS,
        saves: bool = False,
        resumes: bool = False,
        plain: bool = False,
        name: str = "out",
    ) -> Outcome:
        """Train the project.

        Args:
            settings: keys of the config, in addition to the small job's.
            batches: replace the loader's. Random numbers in an iteration then do not depend on
                earlier ones.
            num_iterations: number of iterations.
            saves: whether each iteration saves a checkpoint.
            resumes: whether it continues from the last checkpoint of ``name``.
            plain: whether it runs without d2_memfit.
            name: name of the output folder.
        """
        raise NotImplementedError

    def parts(self, settings: Mapping[str, Any] = {}) -> Parts:
        raise NotImplementedError

    def job(self, settings: Mapping[str, Any] = {}, full_size: bool = False) -> Job:
        """Make the job as d2_memfit sees it.

        Args:
            full_size: whether it is the project's own recipe, on photographs like COCO's.
        """
        raise NotImplementedError

    no_evaluation: Mapping[str, Any] = {"DATASETS.TEST": ()}

    def settings(self, images: int) -> dict[str, Any]:
        """Config keys for a batch of ``images`` images."""
        return {"SOLVER.IMS_PER_BATCH": images}

    def record(self, num_batches: int, images: int) -> list[Any]:
        seed_all(7)
        loader = self.parts(self.settings(images)).loader
        return [copy.deepcopy(b) for b in itertools.islice(iter(loader), num_batches)]

    def step(self, parts: Parts) -> None:
        """Run the project's own optimizer step."""
        parts.optimizer.step()

    def losses(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Sum of the project's own losses of a batch."""
        losses = model(batch)
        return losses if isinstance(losses, torch.Tensor) else sum(losses.values())


class recorded_losses:
    """While open, record the total losses that any storage gets."""

    def __enter__(self) -> list[float]:
        self._put_scalar = put_scalar = EventStorage.put_scalar
        found: list[float] = []

        def put(storage: EventStorage, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if name == "total_loss" and type(storage) is EventStorage:
                found.append(float(value))
            put_scalar(storage, name, value, *args, **kwargs)

        EventStorage.put_scalar = put
        return found

    def __exit__(self, *_: Any) -> None:
        EventStorage.put_scalar = self._put_scalar


def state_of(model: nn.Module, optimizer: Optional[torch.optim.Optimizer]) -> dict[str, Any]:
    state = {f"model.{k}": v for k, v in model.state_dict().items()}
    if optimizer is not None:
        for i, values in optimizer.state_dict()["state"].items():
            state.update({f"optimizer.{i}.{k}": v for k, v in values.items()})
    return copy.deepcopy(state)


def make_subject(project: Project, folder: Path, scratch: Path) -> Subject:
    kinds = {
        "trainer": "trainer_class:TrainerSubject",
        "loop": "own_loop:LoopSubject",
        "lazy": "own_loop:LazySubject",
    }
    module, _, name = kinds[project.kind].partition(":")
    subject = getattr(importlib.import_module(f".{module}", __package__), name)
    return subject(project, folder, scratch)
