# Copyright (c) the d2_memfit developers.
"""A LazyConfig as a job: its parts, and its values as keys of a yacs config."""

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

from ..common.checks import check_positive_int
from ..config import cfg_of_techniques, with_settings
from ..errors import ConfigError, one_line

__all__ = ["LazyParts", "cfg_of_lazy", "load_lazy_config", "overrides_of", "with_overrides"]

# Keys of yacs with their own place in a LazyConfig; the rest of MEMFIT is in train.memfit.
_NAMES = {
    "SOLVER.IMS_PER_BATCH": "dataloader.train.total_batch_size",
    "SOLVER.MAX_ITER": "train.max_iter",
    "DATALOADER.NUM_WORKERS": "dataloader.train.num_workers",
    "MODEL.DEVICE": "train.device",
    "MODEL.WEIGHTS": "train.init_checkpoint",
    "OUTPUT_DIR": "train.output_dir",
    "SOLVER.ACCUMULATION_STEPS": "train.accumulation_steps",
    "SOLVER.AMP.ENABLED": "train.amp.enabled",
    "MEMFIT.AMP_DTYPE": "train.amp.dtype",
    "MEMFIT.MICRO_BATCH": "train.micro_batch",
    "MEMFIT.BUDGET_GB": "train.budget_gb",
}


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
        return [lambda: instantiate(self.cfg.dataloader.test)] if _evaluates(self.cfg) else []

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


def _evaluates(cfg: DictConfig) -> bool:
    return all(cfg.dataloader.get(name) is not None for name in ("test", "evaluator"))


def overrides_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Translate keys of a yacs config into places in a LazyConfig.

    Raises:
        ConfigError: a LazyConfig has no such key.
    """
    overrides = {}
    for key, value in settings.items():
        if key in _NAMES:
            overrides[_NAMES[key]] = value
        elif key.startswith("MEMFIT.OOM."):
            overrides[f"train.{key[len('MEMFIT.') :].lower()}"] = value
        elif key.startswith("MEMFIT."):
            overrides[f"train.{key.lower()}"] = value
        else:
            raise ConfigError(f"{key} has no place in a LazyConfig")
    return overrides


def with_overrides(cfg: DictConfig, overrides: Mapping[str, Any]) -> DictConfig:
    """Copy a LazyConfig with other values at some places."""
    changed = copy.deepcopy(cfg)
    for place, value in overrides.items():
        OmegaConf.update(changed, place, value, force_add=True)
    return changed


def cfg_of_lazy(cfg: DictConfig) -> CfgNode:
    """Make a yacs config with the values of a LazyConfig's ``train`` and ``dataloader``.

    Raises:
        ConfigError: a value cannot work, or a value that a job needs is missing.
    """
    for node in ("model", "optimizer", "dataloader", "train"):
        if node not in cfg:
            raise ConfigError(f"the LazyConfig has no {node}, which a job needs")
    train, loader = cfg.train, cfg.dataloader.get("train")
    for key in ("max_iter", "device", "output_dir"):
        if train.get(key) is None:
            raise ConfigError(f"the LazyConfig has no train.{key}, which a job needs")
    if loader is None or loader.get("total_batch_size") is None:
        raise ConfigError("dataloader.train.total_batch_size is missing")
    steps, micro_batch = train.get("accumulation_steps", 1), train.get("micro_batch")
    check_positive_int("train.accumulation_steps", steps)
    if micro_batch is not None:
        check_positive_int("train.micro_batch", micro_batch)
    memfit = train.get("memfit") or {}
    for key in {"micro_batch", "amp_dtype", "budget_gb", "oom"} & set(memfit):
        name = "amp.dtype" if key == "amp_dtype" else key
        raise ConfigError(f"train.memfit.{key} is train.{name} in a LazyConfig")
    keys = cfg_of_techniques({**memfit, "oom": train.get("oom") or {}})
    if keys.MEMFIT.HOST.BUDGET_GB is not None:
        raise ConfigError(
            "train.memfit.host.budget_gb cannot be used in a LazyConfig: lower "
            "dataloader.train.num_workers"
        )
    keys.DATALOADER.NUM_WORKERS = 0
    values = {key: OmegaConf.select(cfg, place) for key, place in _NAMES.items()}
    keys = with_settings(keys, {key: v for key, v in values.items() if v is not None})
    keys.DATALOADER.ASPECT_RATIO_GROUPING = loader.get("aspect_ratio_grouping", True)
    keys.DATASETS.TEST = ("dataloader.test",) if _evaluates(cfg) else ()
    keys.TEST.EVAL_PERIOD = train.get("eval_period", 0)
    return keys
