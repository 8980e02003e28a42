# Copyright (c) the d2_memfit developers.
"""The parts of a job from a LazyConfig."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

from detectron2.config import CfgNode, LazyConfig, instantiate
from detectron2.evaluation import inference_on_dataset
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.optim import Optimizer

from ..config.lazy import evaluates_lazy, overrides_of
from ..errors import ConfigError, one_line

__all__ = ["LazyParts", "load_lazy_config", "with_overrides"]


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


@dataclass(frozen=True)
class LazyParts:
    """The parts that a LazyConfig instantiates, as in Detectron2's ``lazyconfig_train_net.py``.

    They are called like :class:`~.parts.TrainerParts`.

    Args:
        cfg: with the nodes model, optimizer, dataloader and train.
    """

    cfg: DictConfig
    has_default_loader = False
    assumptions = ()
    loss_fn = None

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

    def with_cfg(self, cfg: CfgNode) -> "LazyParts":
        return self

    def with_settings(self, settings: Mapping[str, Any]) -> "LazyParts":
        places = overrides_of(settings)
        if not any(place.startswith("dataloader.") for place in places):
            return self  # they do not concern what it instantiates
        return LazyParts(with_overrides(self.cfg, places))

    def without_resizing(self) -> "LazyParts":
        """The same parts, whose loaders have no augmentations."""
        loaders = [name for name in ("train", "test") if self.cfg.dataloader.get(name) is not None]
        places = [f"dataloader.{name}.mapper.augmentations" for name in loaders]
        for place in places:
            if OmegaConf.select(self.cfg, place) is None:
                raise ConfigError(f"{place} is missing, so a size cannot be chosen: give a batch")
        return LazyParts(with_overrides(self.cfg, {place: [] for place in places}))


def with_overrides(cfg: DictConfig, overrides: Mapping[str, Any]) -> DictConfig:
    """Copy a LazyConfig with other values at some places."""
    changed = copy.deepcopy(cfg)
    for place, value in overrides.items():
        OmegaConf.update(changed, place, value, force_add=True)
    return changed
