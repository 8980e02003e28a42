# Copyright (c) the d2_memfit developers.
"""Translation between config keys, places in a LazyConfig and names of arguments."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from detectron2.config import CfgNode
from omegaconf import DictConfig, OmegaConf

from ..config import cfg_of_memfit, with_settings
from ..errors import ConfigError

__all__ = [
    "ARGUMENTS",
    "argument_name",
    "cfg_of_lazy",
    "evaluates_lazy",
    "lazy_name",
    "named",
    "overrides_of",
]

_KEY = re.compile(
    r"\b(?:OUTPUT_DIR|(?:DATALOADER|DATASETS|MEMFIT|MODEL|SOLVER|TEST)(?:\.[A-Z][A-Z0-9_]*)+)\b"
)
# Keys of yacs with their own place in a LazyConfig; the rest of MEMFIT is in train.memfit.
_LAZY_NAMES = {
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
    "MEMFIT.OOM": "train.oom",
}
_IN_MESSAGES = {"DATASETS.TEST": "dataloader.test", "TEST.EVAL_PERIOD": "train.eval_period"}
# Arguments of jobs and trainers that have other names than keys.
ARGUMENTS = {
    "accumulation_steps": "SOLVER.ACCUMULATION_STEPS",
    "amp_dtype": "MEMFIT.AMP_DTYPE",
    "device": "MODEL.DEVICE",
    "images_per_batch": "SOLVER.IMS_PER_BATCH",
    "max_iter": "SOLVER.MAX_ITER",
    "micro_batch_size": "MEMFIT.MICRO_BATCH",
    "output_dir": "OUTPUT_DIR",
    "test_loader": "DATASETS.TEST",
}
_NAMES = {key: name for name, key in ARGUMENTS.items()}


def lazy_name(key: str) -> str:
    """The place of a key in a LazyConfig; the key itself if there is none."""
    if key in _LAZY_NAMES:
        return _LAZY_NAMES[key]
    if key.startswith("MEMFIT.OOM."):
        return f"train.{key[len('MEMFIT.') :].lower()}"
    return f"train.{key.lower()}" if key.startswith("MEMFIT.") else _IN_MESSAGES.get(key, key)


def argument_name(key: str) -> str:
    """The argument of :class:`~d2_memfit.job.Job` for a key."""
    return _NAMES.get(key, key.lower() if key.startswith("MEMFIT.") else key)


@contextmanager
def named(name: Callable[[str], str]) -> Iterator[None]:
    """While open, rename the keys in the messages of errors with ``name``."""
    try:
        yield
    except ConfigError as e:
        text = _KEY.sub(lambda match: name(match[0]), str(e))
        if text == str(e):
            raise
        raise type(e)(text) from e


def overrides_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Translate keys of a yacs config into places in a LazyConfig.

    Raises:
        ConfigError: a LazyConfig has no such key.
    """
    for key in settings:
        if key not in _LAZY_NAMES and not key.startswith("MEMFIT."):
            raise ConfigError(f"{key} has no place in a LazyConfig")
    return {lazy_name(key): value for key, value in settings.items()}


def evaluates_lazy(cfg: DictConfig) -> bool:
    """Whether a LazyConfig has a test loader and an evaluator."""
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
        raise ConfigError(f"in a LazyConfig, train.memfit.{key} is called {place}")
    with named(lazy_name):
        keys = cfg_of_memfit({**memfit, "oom": train.get("oom") or {}})
    if keys.MEMFIT.HOST.BUDGET_GB is not None:
        raise ConfigError(
            "train.memfit.host.budget_gb cannot be used in a LazyConfig: lower "
            "dataloader.train.num_workers"
        )
    keys.DATALOADER.NUM_WORKERS = 0
    values = {key: OmegaConf.select(cfg, _LAZY_NAMES[key]) for key in _LAZY_NAMES}
    del values["MEMFIT.OOM"]
    keys = with_settings(keys, {key: v for key, v in values.items() if v is not None})
    keys.DATALOADER.ASPECT_RATIO_GROUPING = loader.get("aspect_ratio_grouping", True)
    keys.DATASETS.TEST = ("dataloader.test",) if evaluates_lazy(cfg) else ()
    keys.TEST.EVAL_PERIOD = train.get("eval_period", 0)
    return keys
