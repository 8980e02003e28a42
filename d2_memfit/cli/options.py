# Copyright (c) the d2_memfit developers.
"""Config keys and values from the options --card and --coco."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

from detectron2.config import CfgNode
from omegaconf import DictConfig

from ..common.checks import value_of
from ..config.cards import settings_of_card
from ..config.files import find_config_file, keys_in_own_files
from ..config.lazy import lazy_name, overrides_of
from ..config.load import load_cfg, merge_opts
from ..data import (
    CocoFile,
    Setting,
    check_coco_file,
    fit_to_data,
    goes_with_data,
    keep_dicts,
    register_coco,
)
from ..errors import ConfigError
from ..job import with_overrides

__all__ = ["check_opts", "opts_of_budget", "opts_of_fit", "opts_of_settings", "with_data"]
__all__ += ["with_opts"]


def check_opts(opts: Sequence[str]) -> None:
    """Raise :class:`ConfigError` unless ``opts`` are KEY VALUE pairs."""
    for key in opts[::2]:
        if key.startswith("--"):
            raise ConfigError(f"{key}: options must come before the KEY VALUE pairs")
        name, sign, value = key.partition("=")
        if sign:
            raise ConfigError(f"{key}: write it with a space, {name} {value or 'VALUE'}")
    if len(opts) % 2:
        raise ConfigError(
            f"KEY VALUE pairs: a value is missing after {opts[-1]}. Quote values with spaces: "
            """DATASETS.TRAIN "('my_train',)\""""
        )


def opts_of_budget(card: Optional[str], budget: Optional[str], opts: Sequence[str]) -> list[str]:
    """KEY VALUE pairs for ``--card`` and ``--budget``.

    Args:
        card: nominal memory or a name, as for :func:`settings_of_card`; None if it is not given.
        budget: a number of GB, or "auto"; None if it is not given.
        opts: KEY VALUE pairs, or path.key=value for a LazyConfig.

    Raises:
        ConfigError: there is no such card or number, or more than one of card, budget and
            ``opts`` name a budget.
    """
    named = [f"--card {card}"] if card is not None else []
    named += [f"--budget {budget}"] if budget is not None else []
    if not named:
        return []
    given = {option.partition("=")[0].lstrip("+") for option in opts}
    keys = ("MEMFIT.BUDGET_GB", "MEMFIT.PRESET")
    named += [key for key in (*keys, *map(lazy_name, keys)) if key in given]
    if len(named) > 1:
        raise ConfigError(f"{named[0]} and {named[1]} both set the budget: give only one")
    if card is not None:
        return [str(part) for setting in settings_of_card(card).items() for part in setting]
    if budget != "auto" and not _is_number(str(budget)):
        raise ConfigError(
            f"--budget must be a number of GB, such as 6, got {budget!r}. A card is --card 6GB"
        )
    return ["MEMFIT.BUDGET_GB", str(budget)]


def opts_of_fit(cfg: CfgNode, eval_only: bool) -> dict[str, str]:
    """Values of keys for ``--fit``."""
    # A plan turns on "split", where the model can be split.
    opts = {"MEMFIT.OOM.POLICY": "split"} if eval_only else {"MEMFIT.PLAN.ENABLED": "True"}
    if cfg.MEMFIT.BUDGET_GB is None and not cfg.MEMFIT.PRESET:
        opts["MEMFIT.BUDGET_GB"] = "auto"
    return opts


def with_opts(cfg: DictConfig, opts: Sequence[str]) -> DictConfig:
    """A LazyConfig with the values of KEY VALUE pairs."""
    values = load_cfg("", opts)
    return with_overrides(cfg, overrides_of({key: value_of(values, key) for key in opts[::2]}))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def with_data(
    recipe: CfgNode,
    coco: Sequence[Sequence[str]],
    config_file: str,
    opts: Sequence[str],
    check: Callable[[CfgNode], Any],
    *,
    eval_only: bool = False,
    reads_images: bool = False,
    keeps: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[CfgNode, list[Setting]]:
    """Complete a config with options and with settings from the datasets of ``--coco``.

    The datasets are registered and checked.

    Only keys that the user has not given are set. Values in a file for other datasets do not apply
    to these. A plan made for COCO also applies to your own data, except for its schedule and
    classes.

    Args:
        recipe: the config of ``config_file``, which is left as it is.
        coco: values of ``--coco``.
        config_file, opts: as for :func:`~d2_memfit.config.load.load_cfg`.
        check: raises :class:`ConfigError` if the config cannot work, before the datasets are read.
        eval_only: whether nothing is trained.
        reads_images: whether images must exist, or only the annotations.
        keeps: whether this process trains. What the check has read is then kept for it.
        progress: as for :func:`~d2_memfit.data.check_coco_file`.

    Returns:
        The config, and the settings in it that follow from the data.
    """
    names = [name for name, _, _ in coco]
    for name in names:
        if names.count(name) > 1 or not name.isprintable():
            raise ConfigError(f"--coco {name!r} is given twice or not printable: use another name")
    for dataset in coco:
        register_coco(*dataset)
    given = set(opts[::2])
    if coco and config_file:
        datasets = recipe.DATASETS
        of_file = keys_in_own_files(find_config_file(config_file))
        names_others = bool({"DATASETS.TRAIN", "DATASETS.TEST"} & of_file)
        if names_others and not {*datasets.TRAIN, *datasets.TEST} & set(names):
            of_file = {key for key in of_file if not goes_with_data(key)}
        given |= of_file
    settings = _roles(names, given, eval_only) if coco else []
    cfg = recipe.clone()
    merge_opts(cfg, [*opts_of_settings(settings), *opts])
    check(cfg)
    if not coco:
        return cfg, []
    train: list[CocoFile] = []
    test: list[CocoFile] = []
    for name, json_file, image_dir in coco:
        trains = name in cfg.DATASETS.TRAIN and not eval_only
        if trains or name in cfg.DATASETS.TEST:
            folder = image_dir if reads_images else None
            if not reads_images and not Path(image_dir).is_dir():
                why = f"{image_dir} does not exist here. Training needs the images of {name}"
                settings.append(Setting("", None, why))
            needs_objects = trains and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
            file = check_coco_file(name, json_file, folder, needs_objects, progress)
            train += [file] if trains else []
            test += [file] if name in cfg.DATASETS.TEST else []
    of_data = fit_to_data(cfg, train, test, given)
    merge_opts(cfg, opts_of_settings(of_data))
    for file in train if keeps else ():
        keep_dicts(file.name, file.content)
    return cfg, [*settings, *of_data]


def opts_of_settings(settings: Sequence[Setting]) -> list[str]:
    """KEY VALUE pairs of settings, to be placed before the user's."""
    return [text for s in settings if s.key for text in (s.key, str(s.value))]


def _roles(names: Sequence[str], given: set[str], eval_only: bool) -> list[Setting]:
    """Settings that choose the datasets for training and evaluation, unless DATASETS is given."""
    others = names[1:] if len(names) > 1 or not eval_only else names
    train = Setting("DATASETS.TRAIN", (names[0],), "the first of --coco")
    why = "those of --coco" + ", except the first" * (len(others) < len(names))
    test = Setting("DATASETS.TEST", tuple(others), why)
    roles = [test] if eval_only else [train, test]
    return [role for role in roles if role.key not in given]
