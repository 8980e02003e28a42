# Copyright (c) the d2_memfit developers.
"""Functions that make, complete and load configs with the keys of d2_memfit."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial, reduce
from typing import Any

from detectron2.config import CfgNode as CN
from detectron2.config import get_cfg as _get_detectron2_cfg

from ..common.checks import check_all
from ..common.errors import ConfigError
from .files import arithmetic_in_yaml, find_config_file
from .keys import all_keys, checks_of, leaves, unknown_key

__all__ = ["add_memfit_config", "get_cfg", "load_cfg", "merge_memfit", "merge_opts"]
__all__ += ["with_memfit_keys", "with_settings"]

Pairs = Sequence[tuple[str, Any, str]]  # keys, values, and the start of messages about them


def add_memfit_config(cfg: CN) -> None:
    """Add the keys of d2_memfit to a Detectron2 config. Existing keys keep their values."""
    for key in all_keys():
        *parents, name = key.name.split(".")
        node = cfg
        for parent in parents:
            if parent not in node:
                # Use the config's own class: yacs merges no other, and a project may have one.
                setattr(node, parent, type(cfg)())
            node = node[parent]
        if name not in node:
            setattr(node, name, copy(key.default))


def with_memfit_keys(cfg: CN) -> CN:
    """A copy of a config, not frozen, with missing keys of d2_memfit added."""
    complete = cfg.clone()
    complete.defrost()
    add_memfit_config(complete)
    return complete


def with_settings(cfg: CN, settings: Mapping[str, Any]) -> CN:
    """A copy of a config with other values for some keys, such as ``{"MODEL.DEVICE": "cpu"}``.

    Raises:
        ConfigError: there is no such key.
    """
    changed = cfg.clone()  # which is frozen if the config is; items are set nevertheless
    known = [*dict(leaves(cfg))]
    for key, value in settings.items():
        node, name = _node_of(changed, key, known)
        node[name] = value
    return changed


def _node_of(cfg: CN, key: str, known: Sequence[str], where: str = "") -> tuple[CN, str]:
    """The node of a key, and the key's own name. A key that is not known is an error."""
    if key not in known:
        raise unknown_key(key, known, where)
    *parents, name = key.split(".")
    return reduce(getattr, parents, cfg), name


def get_cfg() -> CN:
    """Detectron2's ``get_cfg()`` plus the keys of d2_memfit."""
    cfg = _get_detectron2_cfg()
    add_memfit_config(cfg)
    return cfg


def load_cfg(
    config_file: str = "",
    opts: Sequence[Any] = (),
    add_keys: Sequence[Callable[..., Any]] = (),
    later_opts: Sequence[Any] = (),
) -> CN:
    """Load a config: all keys, then a config file, then ``KEY VALUE`` pairs of a command line.

    Args:
        config_file: as for :func:`~d2_memfit.config.files.find_config_file`; "" for none.
        add_keys: functions that add a project's keys, such as ``add_pointrend_config``; or that
            take no arguments and return a config, such as ``adet.config.get_cfg``.
        later_opts: pairs that are merged later. If the file is wrong, the error has theirs, too.

    Raises:
        ConfigError: the file does not exist or is not safe YAML, a project's function fails, or
            some keys or values are wrong. The message has a line for each.
    """
    cfg = get_cfg()
    for add in add_keys:
        try:
            if inspect.signature(add).parameters:
                add(cfg)
            else:
                cfg = add()
                add_memfit_config(cfg)
        except Exception as e:  # whatever a project's code raises
            what = f"{add.__name__} could not add a project's keys to the config"
            raise ConfigError(f"{what} ({type(e).__name__}: {e})") from e
    wrong = _merge_file(cfg, find_config_file(config_file)) if config_file else ()
    _merge(cfg, [*wrong, *_pairs(cfg, [*opts, *(later_opts if wrong else ())])])
    return cfg


def merge_opts(cfg: CN, opts: Sequence[Any]) -> None:
    """Merge ``KEY VALUE`` pairs. A preset replaces the budget of a file.

    Raises:
        ConfigError: some keys or values are wrong. The message has a line for each.
    """
    _merge(cfg, _pairs(cfg, opts))


def _pairs(cfg: CN, opts: Sequence[Any]) -> Pairs:
    for text in map(str, opts):
        if text != text.encode(errors="ignore").decode():
            raise ConfigError(f"{text!r} is not UTF-8, as a config must be: use another name")
    for key in map(str, opts[::2]):
        if key.startswith("--"):
            raise ConfigError(f"KEY VALUE pairs: options such as {key} come before all of them")
    if len(opts) % 2:
        raise ConfigError(f"KEY VALUE pairs: a value is missing after {opts[-1]}")
    pairs = dict(zip(opts[::2], opts[1::2]))
    if pairs.get("MEMFIT.PRESET") and "MEMFIT.BUDGET_GB" not in pairs:
        cfg.MEMFIT.BUDGET_GB = None
    return [(key, value, "") for key, value in pairs.items()]


def merge_memfit(cfg: CN, keys: Mapping[str, Any]) -> None:
    """Merge keys of MEMFIT, such as those of a LazyConfig's ``train.memfit``.

    Args:
        keys: nested, in lower or upper case, such as ``{"checkpoint": {"modules": ["backbone"]}}``.

    Raises:
        ConfigError: some keys or values are wrong. The message has a line for each.
    """
    _merge(cfg, [(key.upper(), value, "") for key, value in leaves(keys, "MEMFIT.")])


def _merge_file(cfg: CN, file: str) -> Pairs:
    """Merge a config file; if that fails, return its keys and values, of which some are wrong."""
    try:
        with arithmetic_in_yaml():
            try:
                cfg.merge_from_file(file, allow_unsafe=False)
                return ()
            except Exception:  # which names the first key that is wrong
                values = CN(CN.load_yaml_with_base(file))
                return [(key, value, f"{file}: ") for key, value in leaves(values)]
    except Exception as e:
        why = f"{type(e).__name__}: {' '.join(str(e).split())}"
        raise ConfigError(f"{file} cannot be read as a mapping of keys to values ({why})") from e


def _merge(cfg: CN, pairs: Pairs) -> None:
    """Merge keys and values. If some are wrong, the error has the values that cannot work, too."""
    known = [*dict(leaves(cfg))]
    merges = [([pair[0]], partial(_merge_value, cfg, *pair, known)) for pair in pairs]
    try:
        check_all(merges)
    except ConfigError:
        check_all([*merges, *checks_of(cfg)])


def _merge_value(cfg: CN, key: str, value: Any, where: str, known: Sequence[str]) -> None:
    node, name = _node_of(cfg, key, known, where)
    if any(own.name == key and own.default is None for own in all_keys()):
        node[name] = None  # of any type: MEMFIT.BUDGET_GB is 6, 5.5 or "auto"
    try:
        cfg.merge_from_list([key, value])
    except Exception as e:
        text = f"{where}{key} must be of type {type(node[name]).__name__}, got {str(value)[:999]}"
        if isinstance(node[name], tuple):
            text += """. Write "(800,)" for one number, "('my_train',)" for one name"""
        raise ConfigError(text) from e
