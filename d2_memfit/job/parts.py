# Copyright (c) the d2_memfit developers.
"""The factories of a job's model, optimizer and loaders: of a trainer, a LazyConfig, or pieces."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional, Union

import torch
from detectron2.config import CfgNode, LazyConfig, instantiate
from detectron2.engine import DefaultTrainer
from detectron2.evaluation import inference_on_dataset
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.optim import Optimizer

from ..common.errors import ConfigError, one_line
from ..config.lazy import evaluates_lazy, overrides_of
from ..config.load import with_settings

__all__ = ["GivenParts", "LazyParts", "LossFn", "Parts", "TrainerParts", "load_lazy_config"]
__all__ += ["losses_of", "with_overrides"]

LossFn = Callable[[nn.Module, Any], Union[torch.Tensor, Mapping[str, torch.Tensor]]]


def losses_of(
    model: nn.Module, batch: Any, loss_fn: Optional[LossFn] = None
) -> Mapping[str, torch.Tensor]:
    """The losses by name, of ``loss_fn(model, batch)`` or of ``model(batch)``."""
    losses = model(batch) if loss_fn is None else loss_fn(model, batch)
    return {"total_loss": losses} if isinstance(losses, torch.Tensor) else losses


def load_lazy_config(path: str, opts: Sequence[str]) -> DictConfig:
    """Load a LazyConfig and apply overrides.

    Raises:
        ConfigError: the file's code raises an error, or an override is invalid.
    """
    try:
        cfg = LazyConfig.load(path)
    except (Exception, SystemExit) as e:  # its code may raise anything
        raise ConfigError(f"{path} cannot be loaded ({type(e).__name__}: {one_line(e)})") from e
    try:
        return LazyConfig.apply_overrides(cfg, list(opts))
    except Exception as e:
        raise ConfigError(
            f"{' '.join(opts)!r} cannot be overrides of {path} ({type(e).__name__}: {one_line(e)})"
            ": each is key=value, and options such as --resume come before all of them"
        ) from e


def with_overrides(cfg: DictConfig, overrides: Mapping[str, Any]) -> DictConfig:
    """Copy a LazyConfig with other values at some places."""
    changed = copy.deepcopy(cfg)
    OmegaConf.set_readonly(changed, None)
    for place, value in overrides.items():
        OmegaConf.update(changed, place, value, force_add=True)
    return changed


class _Parts:
    """What is the same for most parts.

    ``with_cfg(cfg, settings)`` gives the parts of a job with another complete yacs config, in which
    the keys of ``settings`` have changed.

    Attributes:
        loss_fn: takes the place of ``model(batch)`` in training.
    """

    loss_fn: Optional[LossFn] = None

    def ddp_options(self) -> dict[str, Any]:
        """Keyword arguments of ``DistributedDataParallel``, without those of techniques."""
        return {}

    def clip_gradients(self) -> Optional[Callable[[Any], Any]]:
        """A function that clips the gradients of parameters, if the optimizer does not."""
        return None


@dataclass(frozen=True)
class TrainerParts(_Parts):
    """The class methods of a trainer, called with a config.

    Args:
        cfg: a yacs config.
        trainer: a class with the ``build_*`` methods of ``DefaultTrainer``. Missing ones are
            Detectron2's.
    """

    cfg: CfgNode
    trainer: Any = DefaultTrainer

    def build_model(self, device: str) -> nn.Module:
        there = with_settings(self.cfg, {"MODEL.DEVICE": device})
        return self._method("build_model")(there).to(device)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        return self._method("build_optimizer")(self.cfg, model)

    def build_train_loader(self) -> Any:
        build = self._method("build_train_loader")
        is_own = getattr(build, "__func__", build) is not DefaultTrainer.build_train_loader.__func__
        if not (is_own or self.cfg.DATASETS.TRAIN):
            raise ConfigError("DATASETS.TRAIN is empty: name the dataset, or give a batch")
        return build(self.cfg)

    def test_loaders(self) -> list[Callable[[], Any]]:
        """Functions that make the loaders of the evaluation datasets, if any."""
        build = self._method("build_test_loader")
        return [partial(build, self.cfg, name) for name in self.cfg.DATASETS.TEST]

    def test(self, model: nn.Module) -> Any:
        """Evaluate as the project does."""
        return self._method("test")(self.cfg, model)

    def ddp_options(self) -> dict[str, Any]:
        return {"broadcast_buffers": False}  # DefaultTrainer's

    def with_cfg(self, cfg: CfgNode, settings: Mapping[str, Any]) -> "TrainerParts":
        return TrainerParts(cfg, self.trainer)

    def _method(self, name: str) -> Any:
        if inspect.isfunction(inspect.getattr_static(self.trainer, name, None)):
            raise ConfigError(
                f"{self.trainer.__name__}.{name} must be a classmethod, as in DefaultTrainer"
            )
        return getattr(self.trainer, name, None) or getattr(DefaultTrainer, name)


@dataclass(frozen=True)
class LazyParts(_Parts):
    """The parts that a LazyConfig instantiates, as in Detectron2's ``lazyconfig_train_net.py``.

    They are called like :class:`TrainerParts`.

    Args:
        cfg: with the nodes model, optimizer, dataloader and train.
    """

    cfg: DictConfig

    def build_model(self, device: str) -> nn.Module:
        return instantiate(self.cfg.model).to(device)

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        cfg = copy.deepcopy(self.cfg)  # a config that holds a model is no longer a config
        cfg.optimizer.params.model = model
        return instantiate(cfg.optimizer)

    def build_train_loader(self) -> Any:
        return instantiate(self.cfg.dataloader.train)

    def test_loaders(self) -> list[Callable[[], Any]]:
        return [lambda: instantiate(self.cfg.dataloader.test)] if evaluates_lazy(self.cfg) else []

    def test(self, model: nn.Module) -> Any:
        nodes = self.cfg.dataloader
        return inference_on_dataset(model, instantiate(nodes.test), instantiate(nodes.evaluator))

    def ddp_options(self) -> dict[str, Any]:
        return dict(self.cfg.train.get("ddp", {}))

    def clip_gradients(self) -> Optional[Callable[[Any], Any]]:
        """Gradient clipping from detrex's ``train.clip_grad``."""
        clip = self.cfg.train.get("clip_grad")
        if clip is None or not clip.enabled:
            return None
        return partial(nn.utils.clip_grad_norm_, **clip.params)

    def with_cfg(self, cfg: CfgNode, settings: Mapping[str, Any]) -> "LazyParts":
        return LazyParts(with_overrides(self.cfg, overrides_of(settings)))


@dataclass(frozen=True)
class GivenParts(_Parts):
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

    def with_cfg(self, cfg: CfgNode, settings: Mapping[str, Any]) -> "GivenParts":
        if cfg.MEMFIT.HOST.BUDGET_GB is not None:
            raise ConfigError(
                "host.budget_gb cannot be used in a Job that is made from pieces: lower the number "
                "of workers in its train_loader"
            )
        for key in settings:
            if not key.startswith(("MEMFIT.", "SOLVER.AMP.", "SOLVER.ACCUMULATION_STEPS")):
                raise ConfigError(f"a Job that was made from pieces has no key {key}")
        return self


Parts = Union[TrainerParts, LazyParts, GivenParts]
