# Copyright (c) the d2_memfit developers.
"""The sides of the race. A side whose package is not installed is named, and does not race."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from .job import Job


class Side(NamedTuple):
    """One way to train.

    Attributes:
        name: name in the tables.
        package: package that must be installed.
        file: file in this folder, without .py.
        function: function in that file.
        arguments: arguments of the function, in addition to the job.
        accumulates: whether it takes the effective batch in several pieces.
        techniques: whether the model has d2_memfit's exact techniques.
    """

    name: str
    package: str
    file: str
    function: str = "train"
    arguments: tuple[Any, ...] = ()
    accumulates: bool = True
    techniques: bool = False

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    def load(self) -> Callable[[Job], None]:
        """Import the side; return a function that trains a job."""
        function = getattr(importlib.import_module(f".{self.file}", __package__), self.function)
        return lambda job: function(job, *self.arguments)

    def cut(self, effective_batch: int) -> tuple[int, int]:
        """The side's cut of an effective batch: images in a batch, and accumulation steps."""
        return (1, effective_batch) if self.accumulates else (effective_batch, 1)


PLAIN = Side("Detectron2", "detectron2", "with_detectron2", accumulates=False)
ACCELERATE = Side("Accelerate", "accelerate", "with_accelerate")
LIGHTNING = Side("Lightning", "lightning", "with_lightning")
MMENGINE = Side("mmengine", "mmengine", "with_mmengine")
COMPOSER = Side("Composer", "composer", "with_composer")
OURS = Side("d2_memfit", "d2_memfit", "with_d2_memfit", arguments=("raise",))
OURS_SPLIT = OURS._replace(name="d2_memfit, split", arguments=("split",))
OURS_EXACT = OURS_SPLIT._replace(name="d2_memfit, split, exact techniques", techniques=True)

_FINDER = "train_with_batch_size_finder"
ACCELERATE_FINDER = ACCELERATE._replace(
    name="Accelerate, find_executable_batch_size", function=_FINDER
)
MMENGINE_CHECKPOINTED = MMENGINE._replace(
    name="mmengine, activation_checkpointing", function="train_with_checkpointing"
)
LIGHTNING_FINDER = LIGHTNING._replace(name="Lightning, scale_batch_size", function=_FINDER)
COMPOSER_AUTO = COMPOSER._replace(
    name='Composer, "auto" microbatches', function="train_with_auto_microbatching"
)

ACCUMULATORS = [PLAIN, ACCELERATE, LIGHTNING, MMENGINE, COMPOSER, OURS]
EVERY = [
    *(PLAIN, ACCELERATE, ACCELERATE_FINDER, LIGHTNING, LIGHTNING_FINDER),
    *(MMENGINE, MMENGINE_CHECKPOINTED, COMPOSER, COMPOSER_AUTO),
    *(OURS, OURS_SPLIT, OURS_EXACT),
]
