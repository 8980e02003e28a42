# Copyright (c) the d2_memfit developers.
"""Config keys in a LazyConfig: MEMFIT.X.Y is train.memfit.x.y, and SOLVER.X is train.x."""

from collections.abc import Mapping
from typing import Any

from detectron2.config import CfgNode
from omegaconf import DictConfig, OmegaConf

from ..common.errors import ConfigError
from .load import get_cfg, merge_memfit, with_settings

__all__ = ["cfg_of_lazy", "evaluates_lazy", "lazy_name", "overrides_of"]

_OTHERS = {
    "SOLVER.IMS_PER_BATCH": "dataloader.train.total_batch_size",
    "DATALOADER.NUM_WORKERS": "dataloader.train.num_workers",
    "MODEL.DEVICE": "train.device",
    "MODEL.WEIGHTS": "train.init_checkpoint",
    "OUTPUT_DIR": "train.output_dir",
}
_SOLVER = ("SOLVER.ACCUMULATION_STEPS", "SOLVER.AMP.ENABLED", "SOLVER.MAX_ITER")


def lazy_name(key: str) -> str:
    """The place of a key in a LazyConfig.

    Raises:
        ConfigError: a LazyConfig has no such key.
    """
    if key in _OTHERS:
        return _OTHERS[key]
    if key in _SOLVER or key.startswith("MEMFIT."):
        return f"train.{key.removeprefix('SOLVER.').lower()}"
    raise ConfigError(f"{key} has no place in a LazyConfig")


def overrides_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Translate keys of a yacs config into places in a LazyConfig."""
    return {lazy_name(key): value for key, value in settings.items()}


def evaluates_lazy(cfg: DictConfig) -> bool:
    """Whether a LazyConfig has a test loader and an evaluator."""
    return all(cfg.dataloader.get(name) is not None for name in ("test", "evaluator"))


def cfg_of_lazy(cfg: DictConfig) -> CfgNode:
    """Make a yacs config with the values of a LazyConfig's ``train`` and ``dataloader``.

    Raises:
        ConfigError: there is no such key, or a value that a job needs is missing.
    """
    needed = ("train.max_iter", "train.device", "train.output_dir", _OTHERS["SOLVER.IMS_PER_BATCH"])
    for place in ("model", "optimizer", "dataloader", "train", *needed):
        if OmegaConf.select(cfg, place) is None:
            raise ConfigError(f"the LazyConfig has no {place}, which a job needs")
    for name in ("micro_batch", "budget_gb", "oom", "amp.dtype"):
        if OmegaConf.select(cfg.train, name) is not None:
            now = f"train.memfit.{name.replace('.', '_')}"
            raise ConfigError(f"train.{name} is not read: it is called {now}")
    values = {key: OmegaConf.select(cfg, lazy_name(key)) for key in (*_OTHERS, *_SOLVER)}
    values["DATALOADER.NUM_WORKERS"] = values["DATALOADER.NUM_WORKERS"] or 0
    keys = with_settings(get_cfg(), {key: v for key, v in values.items() if v is not None})
    given: Any = OmegaConf.to_container(cfg.train.get("memfit") or OmegaConf.create(), resolve=True)
    merge_memfit(keys, given)
    keys.DATALOADER.ASPECT_RATIO_GROUPING = cfg.dataloader.train.get("aspect_ratio_grouping", True)
    keys.DATASETS.TEST = ("dataloader.test",) if evaluates_lazy(cfg) else ()
    keys.TEST.EVAL_PERIOD = cfg.train.get("eval_period", 0)
    return keys
