# Copyright (c) the d2_memfit developers.
"""Functions that make, complete and load configs with the keys of d2_memfit."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import yaml
from detectron2.config import CfgNode as CN
from detectron2.config import get_cfg as _get_detectron2_cfg

from ..common.checks import check_all, did_you_mean
from ..errors import ConfigError, DataError, UnknownKeyError
from .files import find_config_file
from .keys import default_keys, keys_of
from .yaml_arithmetic import arithmetic_in_yaml

__all__ = [
    "add_memfit_config",
    "cfg_of_memfit",
    "get_cfg",
    "load_cfg",
    "merge_opts",
    "with_memfit_keys",
    "with_settings",
    "without_memfit_keys",
]


def add_memfit_config(cfg: CN) -> None:
    """Add the keys of d2_memfit to a Detectron2 config. Existing keys keep their values."""
    _add_missing(cfg, default_keys())


def with_memfit_keys(cfg: CN) -> CN:
    """Add missing keys of d2_memfit to a copy of a config; the same config if none is missing."""
    if set(keys_of(default_keys())) <= set(keys_of(cfg)):
        return cfg
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
    """A copy of a config with other values for some keys, such as ``{"MODEL.DEVICE": "cpu"}``.

    If the config is frozen, the copy is too, and shares the nodes that do not differ.
    """
    changed = copy(cfg) if cfg.is_frozen() else cfg.clone()
    for key, value in settings.items():
        node = changed
        *parents, name = key.split(".")
        for parent in parents:
            if not isinstance(node.get(parent), CN):
                raise KeyError(key)
            node[parent] = node = copy(node[parent])
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
    """Load a config: all keys, then a config file, then ``KEY VALUE`` pairs of a command line.

    Args:
        config_file: as for :func:`~d2_memfit.config.files.find_config_file`; "" for none.
        add_keys: functions that add a project's keys, such as ``add_pointrend_config``; or that
            take no arguments and return a config, such as ``adet.config.get_cfg``.

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
    merge_opts(cfg, opts)
    return cfg


def _takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether a function takes no arguments, like a project's own ``get_cfg``."""
    try:
        return not inspect.signature(function).parameters
    except ValueError:  # built-in ones
        return False


def merge_opts(cfg: CN, opts: Sequence[Any]) -> None:
    """Merge ``KEY VALUE`` pairs. A key whose default is None takes a value of any type.

    A file may have set such a key to another type: MEMFIT.BUDGET_GB is 6, 5.5 or "auto".

    Raises:
        ConfigError: some keys or values are wrong. The message names all of them.
    """
    for value in map(str, opts):
        if value != value.encode(errors="ignore").decode():
            raise ConfigError(f"{value!r} is not UTF-8, as a config must be: use another name")
    defaults = default_keys()
    known = set(keys_of(defaults))
    given = dict(zip(opts[::2], opts[1::2]))
    if given.get("MEMFIT.PRESET") and "MEMFIT.BUDGET_GB" not in given:
        cfg.MEMFIT.BUDGET_GB = None  # the preset replaces the budget of a file
    for key in known & set(opts[::2]):
        default, name = _node_of(defaults, key)
        if default[name] is None:
            _node_of(cfg, key)[0][name] = None
    pairs = (opts[i : i + 2] for i in range(0, len(opts), 2))
    check_all(([pair[0]], partial(_merge_pair, cfg, pair)) for pair in pairs)


def _merge_pair(cfg: CN, pair: Sequence[Any]) -> None:
    with _explained(cfg):
        cfg.merge_from_list(list(pair))


def cfg_of_memfit(keys: Mapping[str, Any]) -> CN:
    """Make a config from keys of MEMFIT, such as those of a LazyConfig's ``train.memfit``.

    Args:
        keys: nested, of Python or OmegaConf, in lower or upper case, such as
            ``{"checkpoint": {"modules": ["backbone"]}}``.

    Raises:
        ConfigError: there is no such key, or a value is of the wrong type.
    """
    cfg = get_cfg()
    with _explained(cfg):
        cfg.merge_from_other_cfg(CN({"MEMFIT": _in_upper_case(keys)}))
    return cfg


def _in_upper_case(keys: Any) -> Any:
    if isinstance(keys, Mapping):
        twice = [k for k in keys if k != k.upper() and k.upper() in keys]
        if twice:
            raise ConfigError(f"MEMFIT has both {twice[0]} and {twice[0].upper()}: keep one")
        return {key.upper(): _in_upper_case(value) for key, value in keys.items()}
    if isinstance(keys, Sequence) and not isinstance(keys, str):
        return list(keys)  # OmegaConf's too
    return keys


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
    except (AttributeError, TypeError) as e:  # something other than a mapping was searched for keys
        raise ConfigError(f"{where}not a config: it must be a mapping of keys to values") from e


def _no_such_key(key: str, cfg: CN) -> str:
    known = sorted(set(keys_of(cfg)) - {key})
    text = f"there is no config key {key}{did_you_mean(key.upper(), known)}"
    if key.startswith("MEMFIT."):
        text += ". If 0.2.0 had it, it left in 0.3.0: see CHANGELOG"
    return text


def _add_missing(cfg: CN, defaults: CN) -> None:
    for key, value in defaults.items():
        if key not in cfg:
            # Use the config's own class: yacs merges no other, and a project may have one.
            setattr(cfg, key, type(cfg)(value) if isinstance(value, CN) else value)
        elif isinstance(value, CN):
            _add_missing(cfg[key], value)
