# Copyright (c) the d2_memfit developers.
"""The values of a LazyConfig as keys of a yacs config, and the way back."""

from collections.abc import Mapping
from typing import Any

from detectron2.config import CfgNode
from omegaconf import DictConfig, OmegaConf

from ..config import cfg_of_memfit, with_settings
from ..errors import ConfigError
from .names import LAZY_NAMES, lazy_name, named

__all__ = ["cfg_of_lazy", "evaluates_lazy", "overrides_of"]


def overrides_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Translate keys of a yacs config into places in a LazyConfig.

    Raises:
        ConfigError: a LazyConfig has no such key.
    """
    for key in settings:
        if key not in LAZY_NAMES and not key.startswith("MEMFIT."):
            raise ConfigError(f"{key} has no place in a LazyConfig")
    return {lazy_name(key): value for key, value in settings.items()}


def evaluates_lazy(cfg: DictConfig) -> bool:
    """Whether a LazyConfig says on what to evaluate, and how."""
    return all(cfg.dataloader.get(name) is not None for name in ("test", "evaluator"))


def cfg_of_lazy(cfg: DictConfig) -> CfgNode:
    """Make a yacs config with the values of a LazyConfig's ``train`` and ``dataloader``.

    Raises:
        ConfigError: there is no such key, or a value that a job needs is missing.
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
    memfit = train.get("memfit") or {}
    for key in {"micro_batch", "amp_dtype", "budget_gb", "oom"} & set(memfit):
        place = lazy_name(f"MEMFIT.{key.upper()}")
        raise ConfigError(f"train.memfit.{key} is {place} in a LazyConfig")
    with named(lazy_name):
        keys = cfg_of_memfit({**memfit, "oom": train.get("oom") or {}})
    if keys.MEMFIT.HOST.BUDGET_GB is not None:
        raise ConfigError(
            "train.memfit.host.budget_gb cannot be used in a LazyConfig: lower "
            "dataloader.train.num_workers"
        )
    keys.DATALOADER.NUM_WORKERS = 0
    values = {key: OmegaConf.select(cfg, LAZY_NAMES[key]) for key in LAZY_NAMES}
    del values["MEMFIT.OOM"]
    keys = with_settings(keys, {key: v for key, v in values.items() if v is not None})
    keys.DATALOADER.ASPECT_RATIO_GROUPING = loader.get("aspect_ratio_grouping", True)
    keys.DATASETS.TEST = ("dataloader.test",) if evaluates_lazy(cfg) else ()
    keys.TEST.EVAL_PERIOD = train.get("eval_period", 0)
    return keys
