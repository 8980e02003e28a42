# Copyright (c) the d2_memfit developers.
"""Configs with the keys of d2_memfit: made, completed, loaded and checked."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Optional

import yaml
from detectron2.config import CfgNode as CN
from detectron2.config import get_cfg as _get_detectron2_cfg

from ..common.checks import (
    check_bool,
    check_choice,
    check_device,
    check_int,
    check_number,
    check_positive_int,
    check_strings,
    did_you_mean,
    fits,
)
from ..errors import ConfigError, DataError, UnknownKeyError
from ..iteration import check_cost_model
from ..memory import check_budget
from ..techniques import TECHNIQUES, TIERS
from .files import find_config_file
from .keys import default_keys, keys_of
from .presets import budget_of_preset
from .yaml_arithmetic import arithmetic_in_yaml

__all__ = [
    "add_memfit_config",
    "cfg_of_techniques",
    "check_config",
    "check_plan",
    "get_cfg",
    "load_cfg",
    "with_memfit_keys",
    "with_settings",
    "without_memfit_keys",
]


def add_memfit_config(cfg: CN) -> None:
    """Add the keys of d2_memfit to a Detectron2 config. Existing keys keep their values."""
    _add_missing(cfg, default_keys())


def with_memfit_keys(cfg: CN) -> CN:
    """A copy of a Detectron2 config that has the keys of d2_memfit."""
    complete = cfg.clone()
    complete.defrost()
    add_memfit_config(complete)
    if cfg.is_frozen():
        complete.freeze()
    return complete


def without_memfit_keys(cfg: CN) -> CN:
    """Copy a config without the keys of d2_memfit, so that plain Detectron2 can load it."""
    plain = cfg.clone()
    plain.defrost()
    del plain["MEMFIT"], plain.SOLVER["ACCUMULATION_STEPS"]
    return plain


def with_settings(cfg: CN, settings: Mapping[str, Any]) -> CN:
    """A copy of a config that can be changed, with other values for some whole keys."""
    changed = cfg.clone()
    changed.defrost()
    for key, value in settings.items():
        node, name = _node_of(changed, key)
        if name not in node:
            raise KeyError(key)
        node[name] = value
    return changed


def _node_of(cfg: CN, key: str) -> tuple[CN, str]:
    *parents, name = key.split(".")
    for parent in parents:
        cfg = cfg[parent]
    return cfg, name


def get_cfg() -> CN:
    """Detectron2's ``get_cfg()`` plus the keys of d2_memfit."""
    cfg = _get_detectron2_cfg()
    add_memfit_config(cfg)
    return cfg


def load_cfg(
    config_file: str = "",
    opts: Sequence[Any] = (),
    add_keys: Sequence[Callable[..., Any]] = (),
) -> CN:
    """:func:`get_cfg`, then a config file, then ``KEY VALUE`` pairs from a command line.

    Args:
        config_file: as for :func:`~d2_memfit.config.files.find_config_file`; "" is none.
        add_keys: functions that add a project's keys, such as ``add_pointrend_config``; or that
            take nothing and return a config with them, such as ``adet.config.get_cfg``.

    Raises:
        ConfigError: the file does not exist or is not safe YAML, a key or value is wrong, or a
            project's function fails.
    """
    cfg = get_cfg()
    for add in add_keys:
        try:
            if _takes_nothing(add):
                made = add()
                _add_missing(made, cfg)
                cfg = made
            else:
                add(cfg)
        except Exception as e:  # whatever a project's code raises
            raise ConfigError(
                f"{add.__name__} could not add a project's keys to the config "
                f"({type(e).__name__}: {e})"
            ) from e
    if config_file:
        config_file = find_config_file(config_file)
        with _explained(cfg, f"{config_file}: "), arithmetic_in_yaml():
            cfg.merge_from_file(config_file, allow_unsafe=False)
    with _explained(cfg):
        _merge_opts(cfg, opts)
    return cfg


def _takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether a function takes no arguments, as a project's own ``get_cfg``."""
    try:
        return not inspect.signature(function).parameters
    except ValueError:  # built-in ones
        return False


def _merge_opts(cfg: CN, opts: Sequence[Any]) -> None:
    """Merge ``KEY VALUE`` pairs; a key whose default is None takes a value of any type.

    A file may have set such a key to another type: MEMFIT.BUDGET_GB is 6, 5.5 or "auto".
    """
    for value in map(str, opts):
        if value != value.encode(errors="ignore").decode():
            raise ConfigError(f"{value!r} is not UTF-8, and a config is: give another name")
    defaults = default_keys()
    known = set(keys_of(defaults))
    given = dict(zip(opts[::2], opts[1::2]))
    if given.get("MEMFIT.PRESET") and "MEMFIT.BUDGET_GB" not in given:
        cfg.MEMFIT.BUDGET_GB = None  # a file's, which a preset takes the place of
    for key in known & set(opts[::2]):
        default, name = _node_of(defaults, key)
        if default[name] is None:
            _node_of(cfg, key)[0][name] = None
    cfg.merge_from_list(list(opts))


def cfg_of_techniques(keys: Mapping[str, Any]) -> CN:
    """A config that has only nodes of MEMFIT set, such as a LazyConfig's ``train.memfit``.

    Args:
        keys: nested, of Python or OmegaConf, in lower or upper case, such as
            ``{"checkpoint": {"modules": ["backbone"]}}``.

    Raises:
        ConfigError: a key or value is wrong.
    """
    cfg = get_cfg()
    with _explained(cfg):
        cfg.merge_from_other_cfg(CN({"MEMFIT": _in_upper_case(keys)}))
    check_monitor(cfg)
    _check_techniques(cfg)
    return cfg


def _in_upper_case(keys: Any) -> Any:
    if isinstance(keys, Mapping):
        twice = [k for k in keys if k != k.upper() and k.upper() in keys]
        if twice:
            raise ConfigError(f"train.memfit has {twice[0]} and {twice[0].upper()}: write one")
        return {key.upper(): _in_upper_case(value) for key, value in keys.items()}
    if isinstance(keys, Sequence) and not isinstance(keys, str):
        return list(keys)  # OmegaConf's too
    return keys


def check_config(cfg: CN, world_size: Optional[int] = None) -> None:
    """Raise :class:`ConfigError` on the first value that cannot work.

    Args:
        world_size: the number of ranks, where that is known.
    """
    known = set(keys_of(default_keys().MEMFIT))
    for key in keys_of(cfg.MEMFIT):
        if key not in known:
            raise ConfigError(_no_such_key(f"MEMFIT.{key}", cfg))
    check_device(cfg.MODEL.DEVICE)
    check_positive_int("SOLVER.ACCUMULATION_STEPS", cfg.SOLVER.ACCUMULATION_STEPS)
    if cfg.MEMFIT.MICRO_BATCH is not None:
        check_positive_int("MEMFIT.MICRO_BATCH", cfg.MEMFIT.MICRO_BATCH)
    # Without mixed precision it is float32: SOLVER.AMP.ENABLED False.
    check_choice("MEMFIT.AMP_DTYPE", cfg.MEMFIT.AMP_DTYPE, ("float16", "bfloat16"))
    check_plan(cfg)
    check_cost_model(cfg)
    check_monitor(cfg)
    check_weights(cfg)
    check_bool("MEMFIT.EVALUATION.ON_DISK", cfg.MEMFIT.EVALUATION.ON_DISK)
    _check_techniques(cfg)
    check_positive_int("SOLVER.IMS_PER_BATCH", cfg.SOLVER.IMS_PER_BATCH)
    check_positive_int("SOLVER.MAX_ITER", cfg.SOLVER.MAX_ITER)
    if world_size is None:
        return
    for _, technique in TECHNIQUES:
        technique.check(cfg, world_size)
    if cfg.SOLVER.IMS_PER_BATCH % world_size:
        raise ConfigError(
            f"SOLVER.IMS_PER_BATCH must be divisible by the number of ranks, {world_size}, "
            f"got {cfg.SOLVER.IMS_PER_BATCH}"
        )


def check_plan(cfg: CN) -> None:
    """Raise :class:`ConfigError` on the first value of the budget and the plan that cannot work."""
    check_budget(cfg.MEMFIT.BUDGET_GB)
    if cfg.MEMFIT.PRESET:
        budget_of_preset(cfg.MEMFIT.PRESET)
    plan = cfg.MEMFIT.PLAN
    check_bool("MEMFIT.PLAN.ENABLED", plan.ENABLED)
    check_bool("MEMFIT.PLAN.COST_MODEL", plan.COST_MODEL)
    check_bool("MEMFIT.PLAN.FROM_RUNS", plan.FROM_RUNS)
    if not fits(plan.PREDICTED_GB, list[float]) or len(plan.PREDICTED_GB) not in (0, 3):
        raise ConfigError(
            "MEMFIT.PLAN.PREDICTED_GB must be three numbers of GB, as a plan writes them, or [], "
            f"got {plan.PREDICTED_GB!r}"
        )
    if plan.ENABLED and cfg.MEMFIT.BUDGET_GB is None and not cfg.MEMFIT.PRESET:
        raise ConfigError("MEMFIT.PLAN.ENABLED needs a MEMFIT.BUDGET_GB, or a MEMFIT.PRESET")
    if plan.MARGIN is not None:
        check_number("MEMFIT.PLAN.MARGIN", plan.MARGIN, 0.99)
    check_choice("MEMFIT.PLAN.PREFER", plan.PREFER, ("exact", "speed"))
    check_strings("MEMFIT.PLAN.ALLOW", plan.ALLOW)
    for tier in plan.ALLOW:
        check_choice("MEMFIT.PLAN.ALLOW", tier, TIERS)


def check_monitor(cfg: CN) -> None:
    """Raise :class:`ConfigError` on the first value of MEMFIT.MONITOR that cannot work."""
    monitor = cfg.MEMFIT.MONITOR
    if monitor.PERIOD is not None:
        check_positive_int("MEMFIT.MONITOR.PERIOD", monitor.PERIOD)
    if monitor.LEAK_WINDOW is not None:
        check_int("MEMFIT.MONITOR.LEAK_WINDOW", monitor.LEAK_WINDOW, at_least=40)
    if monitor.SNAPSHOT_ITER is not None:
        check_int("MEMFIT.MONITOR.SNAPSHOT_ITER", monitor.SNAPSHOT_ITER, at_least=0)
    check_bool("MEMFIT.MONITOR.SNAPSHOT_ON_OOM", monitor.SNAPSHOT_ON_OOM)


def check_weights(cfg: CN) -> None:
    """Raise :class:`ConfigError` if EMA_DECAY or BEST cannot work."""
    decay, best = cfg.MEMFIT.EMA_DECAY, cfg.MEMFIT.BEST
    if decay is not None and not (isinstance(decay, float) and 0 < decay < 1):
        raise ConfigError(
            f"MEMFIT.EMA_DECAY must be a number above 0 and below 1, such as 0.999, got {decay!r}"
        )
    check_choice("MEMFIT.BEST.MODE", best.MODE, ("max", "min"))
    if best.PATIENCE is not None:
        check_positive_int("MEMFIT.BEST.PATIENCE", best.PATIENCE)
        if not best.METRIC:
            raise ConfigError('MEMFIT.BEST.PATIENCE needs a MEMFIT.BEST.METRIC, such as "bbox/AP"')
    if best.METRIC and not (cfg.TEST.EVAL_PERIOD > 0 and cfg.DATASETS.TEST):
        raise ConfigError(
            f"MEMFIT.BEST.METRIC {best.METRIC}: nothing is evaluated before the end of the run. "
            "Set TEST.EVAL_PERIOD and DATASETS.TEST, or in a LazyConfig train.eval_period and "
            "dataloader.test"
        )


def _check_techniques(cfg: CN) -> None:
    for _, technique in TECHNIQUES:
        technique.is_on(cfg)  # raises on a value that cannot work


@contextmanager
def _explained(cfg: CN, where: str = "") -> Iterator[None]:
    """While open, turn an error of a merge into one line that names the key and the problem.

    yacs says "Non-existent config key: MEMFIT.X", and "Type mismatch (<class 'int'> vs. <class
    'float'>) with values (1 vs. 2.5) for config key: SOLVER.X".
    """
    try:
        yield
    except (AssertionError, DataError, KeyError, OSError, ValueError, yaml.YAMLError) as e:
        text = " ".join(str(e.args[0] if isinstance(e, KeyError) and e.args else e).split())
        kind = ConfigError
        unknown = re.search(r"Non-existent.* key: (\S+)", text)
        if unknown:
            kind, text = UnknownKeyError, _no_such_key(unknown[1], cfg)
        mismatch = re.search(
            r"<class '[\w.]*?(\w+)'> vs.* \(.* vs\. (.*)\) for config key: (\S+)", text
        )
        if mismatch:
            text = f"{mismatch[3]} must be of type {mismatch[1]}, got {mismatch[2]}"
            if mismatch[1] == "tuple":
                text += """. Write "(800,)" for one number, "('my_train',)" for one name"""
        raise kind(where + text) from e
    except (MemoryError, RecursionError) as e:  # MemoryError: brackets in brackets in a text
        raise ConfigError(
            f"{where}its _BASE_ leads back to itself, or too far, or a value is nested too deeply"
        ) from e
    except (AttributeError, TypeError) as e:  # from looking for keys in what has none
        raise ConfigError(f"{where}not a config: it must be a mapping of keys to values") from e


def _no_such_key(key: str, cfg: CN) -> str:
    known = sorted(set(keys_of(cfg)) - {key})
    return f"there is no config key {key}{did_you_mean(key.upper(), known)}"


def _add_missing(cfg: CN, defaults: CN) -> None:
    for key, value in defaults.items():
        if key not in cfg:
            # Of the config's own class, where a project has one: yacs merges no other.
            setattr(cfg, key, type(cfg)(value.clone()) if isinstance(value, CN) else value)
        elif isinstance(value, CN):
            _add_missing(cfg[key], value)
