# Copyright (c) the d2_memfit developers.
"""The factories of a job's model, optimizer and loaders."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, Optional, Union

import torch
from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer
from torch import nn
from torch.optim import Optimizer

from ..common.patching import has_name
from ..config.load import with_settings
from ..errors import ConfigError
from .lazy import LazyParts
from .losses import LossFn

__all__ = ["GivenParts", "Parts", "TrainerParts"]

_KNOWN_STEPS = ("detectron2.engine.", "d2_memfit.")


def _has_own_step(trainer: Any) -> bool:
    """Whether a trainer's class, or one of its project's base classes, has a ``run_step``."""
    step = getattr(trainer, "run_step", None)
    return isinstance(step, FunctionType) and not step.__module__.startswith(_KNOWN_STEPS)


@dataclass(frozen=True)
class TrainerParts:
    """The class methods of a trainer, called with a config.

    Args:
        cfg: a yacs config.
        trainer: a class with the ``build_*`` methods of ``DefaultTrainer``. Missing ones are
            Detectron2's.
    """

    cfg: CfgNode
    trainer: Any = DefaultTrainer
    loss_fn = None

    def build_model(self, device: str) -> nn.Module:
        there = with_settings(self.cfg, {"MODEL.DEVICE": device})
        return self._method("build_model")(there).to(device)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return self._method("build_optimizer")(self.cfg, model)

    def build_train_loader(self) -> Any:
        return self._method("build_train_loader")(self.cfg)

    def test_loaders(self) -> list[Callable[[], Any]]:
        """Functions that make the loaders of the evaluation datasets, if any."""
        build = self._method("build_test_loader")
        return [partial(build, self.cfg, name) for name in self.cfg.DATASETS.TEST]

    def test(self, model: nn.Module) -> Any:
        """Evaluate as the project does."""
        return self._method("test")(self.cfg, model)

    def ddp_options(self) -> dict[str, Any]:
        """Keyword arguments of ``DistributedDataParallel``, without those of techniques."""
        return {"broadcast_buffers": False}  # DefaultTrainer's

    def clip_gradients(self) -> Optional[Callable[[Any], Any]]:
        """A function that clips the gradients of parameters, if the optimizer does not."""
        return None

    @property
    def assumptions(self) -> tuple[str, ...]:
        """A line about the trainer's step, if that is the project's own."""
        if not _has_own_step(self.trainer):
            return ()
        if has_name(inspect.unwrap(self.trainer.run_step).__code__, "run_step"):
            return ()
        return (
            f"{self.trainer.__name__}.run_step, which is the project's own, does what Detectron2's "
            "does. It does not call self._trainer.run_step(), so accumulation, micro-batches and "
            "recovery are errors with it: docs/YOUR_PROJECT.md#what-the-trainer-makes-itself",
        )

    def with_cfg(self, cfg: CfgNode) -> "TrainerParts":
        """The parts with a complete yacs config."""
        return TrainerParts(cfg, self.trainer)

    def with_settings(self, settings: Mapping[str, Any]) -> "TrainerParts":
        """The same parts with other values for some config keys.

        Raises:
            ConfigError: there is no such key.
        """
        return TrainerParts(with_settings(self.cfg, settings), self.trainer)

    def without_resizing(self) -> "TrainerParts":
        """The same parts, whose loaders leave images in their sizes."""
        none = {"MIN_SIZE_TRAIN": (0, 0), "MIN_SIZE_TEST": 0, "CROP.ENABLED": False}
        return self.with_settings({f"INPUT.{key}": value for key, value in none.items()})

    @property
    def has_default_loader(self) -> bool:
        """Whether Detectron2's own ``DatasetMapper`` makes the batches from a yacs config."""
        build = self._method("build_train_loader")
        return getattr(build, "__func__", None) is DefaultTrainer.build_train_loader.__func__

    def _method(self, name: str) -> Any:
        method = getattr(self.trainer, name, None) or getattr(DefaultTrainer, name)
        kind = inspect.getattr_static(self.trainer, name, None)
        if inspect.isfunction(kind):
            raise ConfigError(
                f"{self.trainer.__name__}.{name} must be a classmethod, as in DefaultTrainer"
            )
        return method


@dataclass(frozen=True)
class GivenParts:
    """The functions given for your own training loop, called like :class:`TrainerParts`.

    Args:
        model: makes the model.
        optimizer: makes the optimizer of a model.
        train_loader: makes the loader of a rank's training batches.
        test_loader: makes the loader for evaluation.
        loss_fn: takes the place of ``model(batch)`` in training.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    train_loader: Optional[Callable[[], Any]] = None
    test_loader: Optional[Callable[[], Any]] = None
    loss_fn: Optional[LossFn] = None
    has_default_loader = False
    assumptions = ()

    def build_model(self, device: str) -> nn.Module:
        return self.model().to(torch.device(device))

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return self.optimizer(model)

    def build_train_loader(self) -> Any:
        if self.train_loader is None:
            raise ConfigError("this Job was made without train_loader: give it one, or a batch")
        return self.train_loader()

    def test_loaders(self) -> list[Callable[[], Any]]:
        return [] if self.test_loader is None else [self.test_loader]

    def test(self, model: nn.Module) -> Any:
        raise ConfigError("this Job was made from pieces, and has no test()")

    def ddp_options(self) -> dict[str, Any]:
        return {}

    def clip_gradients(self) -> None:
        return None

    def with_cfg(self, cfg: CfgNode) -> "GivenParts":
        if cfg.MEMFIT.HOST.BUDGET_GB is not None:
            raise ConfigError(
                "host.budget_gb cannot be used in a Job that is made from pieces: lower the number "
                "of workers in its train_loader"
            )
        return self

    def with_settings(self, settings: Mapping[str, Any]) -> "GivenParts":
        for key in settings:
            if not key.startswith(("MEMFIT.", "SOLVER.AMP.", "SOLVER.ACCUMULATION_STEPS")):
                raise ConfigError(f"a Job that was made from pieces has no key {key}")
        return self

    def without_resizing(self) -> "GivenParts":
        raise ConfigError("a Job that was made from pieces resizes its images: give it a batch")


Parts = Union[TrainerParts, LazyParts, GivenParts]
