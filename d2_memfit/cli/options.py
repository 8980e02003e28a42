# Copyright (c) the d2_memfit developers.
"""The config, the job and its data, from the options of the command line."""

import argparse
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional, Union

from detectron2.config import CfgNode
from omegaconf import DictConfig

from ..common.checks import value_of
from ..common.errors import ConfigError
from ..config.cards import settings_of_card
from ..config.files import find_config_file, keys_in_own_files
from ..config.lazy import cfg_of_lazy, overrides_of
from ..config.load import load_cfg, merge_opts
from ..config.settings import check_settings
from ..data.coco_file import check_coco_file
from ..data.registration import register_coco
from ..data.settings import Setting, fit_to_data, goes_with_data
from ..job import GivenBatches, Job, load_lazy_config, with_overrides

__all__ = ["Config", "budget_keys", "check_lazy_options", "find_function", "is_lazy", "job_of"]
__all__ += ["load_config", "load_lazy", "opts_of_budget", "opts_of_fit", "project_functions"]
__all__ += ["trainer_of", "with_data"]

Config = Union[CfgNode, DictConfig]

_BUDGET = re.compile(r"\+?(train\.)?memfit\.(budget_gb|preset)\b", re.IGNORECASE)
_ADDS_KEYS = re.compile(r"add_\w*config")  # as projects name such a function


def is_lazy(config_file: str) -> bool:
    """Whether a config is a LazyConfig: a .py file, or the yaml file that its training wrote."""
    file = Path(config_file)
    if file.suffix != ".yaml" or not file.is_file():
        return file.suffix == ".py"
    with file.open(errors="replace") as f:
        return any(line.startswith("dataloader:") for line in f.read(2**20).splitlines())


def load_config(args: argparse.Namespace, more: Sequence[str] = ()) -> Config:
    """Load the config of the command line, with its budget and what follows from ``--coco``.

    ``args.notes`` gets a line for each setting from the data.

    Args:
        more: KEY VALUE pairs of the command, before the user's.
    """
    args.notes = []
    if is_lazy(args.config_file):
        check_lazy_options(args)
        project_functions(args)  # registers what the config names
        return load_lazy(args, more)
    opts = [*opts_of_budget(args), *more, *args.opts]
    recipe = load_cfg(args.config_file, (), project_functions(args), opts)
    return with_data(recipe, args, opts, trains=bool(args.coco))  # the job checks the rest


def project_functions(args: argparse.Namespace) -> list[Callable[..., Any]]:
    """The functions that add a project's keys: of ``--project``, or in the file of ``--trainer``.

    The folders of ``--project`` are where their modules are looked for. The trainer is imported,
    which also registers what the config names.
    """
    folders = [name for name in args.project if os.path.isdir(name)]
    sys.path[:0] = [name for name in folders if name not in sys.path]
    given = [find_function(name, "--project") for name in args.project if name not in folders]
    if not trainer_of(args) or given:
        return given
    names = vars(sys.modules[args.trainer.partition(":")[0]])
    return [v for name, v in names.items() if _ADDS_KEYS.fullmatch(name) and _takes_a_config(v)]


def _takes_a_config(function: Any) -> bool:
    try:
        inspect.signature(function).bind("cfg")
    except (TypeError, ValueError):
        return False
    return True


def check_lazy_options(args: argparse.Namespace, *others: str) -> None:
    """Raise :class:`ConfigError` for options that a LazyConfig does not take."""
    for name in ("coco", "trainer", *others):
        if getattr(args, name, None):
            raise ConfigError(
                f"--{name.replace('_', '-')} only works with yaml configs. A LazyConfig itself "
                "says what is built"
            )


def load_lazy(args: argparse.Namespace, more: Sequence[str] = ()) -> DictConfig:
    """Load the LazyConfig of the command line, with its budget, as :func:`load_config`."""
    args.config_file = find_config_file(args.config_file, ".py")
    cfg = load_lazy_config(args.config_file, args.opts)
    cfg = _with_opts(cfg, [*opts_of_budget(args), *more])
    return _with_opts(cfg, opts_of_fit(cfg_of_lazy(cfg), args))


def _with_opts(cfg: DictConfig, opts: Sequence[str]) -> DictConfig:
    values = load_cfg("", opts)
    return with_overrides(cfg, overrides_of({key: value_of(values, key) for key in opts[::2]}))


def trainer_of(args: argparse.Namespace) -> Any:
    return find_function(args.trainer, "--trainer") if args.trainer else None


def find_function(name: str, option: str) -> Callable[..., Any]:
    """Find the object named MODULE:NAME. Importing its module registers the project's models.

    Args:
        option: the command-line option, for messages.

    Raises:
        ConfigError: there is no such module or function, or the module cannot be imported.
    """
    module_name, _, function_name = name.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as e:  # a project's code may raise anything
        raise ConfigError(
            f"{option} must be MODULE:NAME, such as train_net:Trainer, got {name!r}, which cannot "
            f"be imported ({type(e).__name__}: {e}). If it is in another folder, add --project "
            "FOLDER"
        ) from e
    return found


def job_of(args: argparse.Namespace, cfg: Config) -> Job:
    """Make the job of a config, with the trainer and the largest batch of the command line."""
    batch = None
    if args.batch:
        batch = find_function(args.batch, "--batch")(cfg)
        GivenBatches(batch)  # raises if it is not a batch
    sizes = {"image_size": args.image_size, "num_instances": args.instances}
    return Job.from_any(cfg, trainer_of(args), args.num_gpus, batch=batch, **sizes)


def opts_of_budget(args: argparse.Namespace) -> list[str]:
    """KEY VALUE pairs for ``--card`` and ``--budget``.

    Raises:
        ConfigError: there is no such card, or the budget is given in two ways.
    """
    budget = getattr(args, "budget", None)
    options = {"--card": args.card, "--budget": budget}
    given = [f"{name} {value}" for name, value in options.items() if value is not None]
    given += budget_keys(args.opts) if given else []
    if given[1:]:
        raise ConfigError(f"{' and '.join(given)}: give only one")
    if args.card is not None:
        return [str(part) for setting in settings_of_card(args.card).items() for part in setting]
    if budget is None:
        return []
    on_cpu = budget == "auto" and getattr(args, "device", None) == "cpu"
    return ["MEMFIT.BUDGET_GB", str(budget), *(["MODEL.DEVICE", "cpu"] if on_cpu else [])]


def budget_keys(opts: Sequence[str]) -> list[str]:
    """Those of a user's pairs, or of a LazyConfig's overrides, that set a budget."""
    return [word for word in opts if _BUDGET.match(word)]


def opts_of_fit(cfg: CfgNode, args: argparse.Namespace) -> list[str]:
    """KEY VALUE pairs for ``--fit``, without those that the user gives."""
    if not getattr(args, "fit", False):
        return []
    # A plan turns on "split", where the model can be split.
    opts = {"MEMFIT.OOM.POLICY": "split"} if args.eval_only else {"MEMFIT.PLAN.ENABLED": "True"}
    if cfg.MEMFIT.BUDGET_GB is None and not cfg.MEMFIT.PRESET:
        opts["MEMFIT.BUDGET_GB"] = "auto"
    return [text for pair in opts.items() if pair[0] not in args.opts for text in pair]


def with_data(
    recipe: CfgNode,
    args: argparse.Namespace,
    opts: Sequence[str],
    *,
    trains: bool,
    ranks: Optional[int] = None,
    reads_images: bool = False,
) -> CfgNode:
    """Complete a config with options and with settings from the datasets of ``--coco``.

    It is checked before the datasets are read. Only keys that the user has not given are set.
    Values in a file for other datasets do not apply to these. A plan made for COCO also applies to
    your own data, except for its schedule and classes. ``args.notes`` gets a line for each setting
    from the data.

    Args:
        recipe: the config of ``--config-file``, which is left as it is.
        opts: as for :func:`~d2_memfit.config.load.load_cfg`.
        trains, ranks: as for :func:`~d2_memfit.config.settings.check_settings`.
        reads_images: whether images must exist, or only the annotations.
    """
    coco, names = args.coco, [name for name, _, _ in args.coco]
    for name, *files in coco:
        if names.count(name) > 1 or not name.isprintable():
            raise ConfigError(f"--coco {name!r} is given twice or not printable: use another name")
        register_coco(name, *files)
    given = set(opts[::2])
    if coco and args.config_file:
        of_file = keys_in_own_files(find_config_file(args.config_file))
        names_others = bool({"DATASETS.TRAIN", "DATASETS.TEST"} & of_file)
        if names_others and not {*recipe.DATASETS.TRAIN, *recipe.DATASETS.TEST} & set(names):
            of_file = {key for key in of_file if not goes_with_data(key)}
        given |= of_file
    settings = _roles(names, given, trains) if coco else []
    cfg = recipe.clone()
    merge_opts(cfg, [*_opts_of(settings), *opts])
    check_settings(cfg, ranks, trains)
    train, test = [], []
    for name, json_file, image_dir in coco:
        is_trained, is_tested = trains and name in cfg.DATASETS.TRAIN, name in cfg.DATASETS.TEST
        if is_trained or is_tested:
            if not reads_images and not Path(image_dir).is_dir():
                why = f"{image_dir} does not exist here. Training needs the images of {name}"
                settings.append(Setting("", None, why))
            needs_objects = is_trained and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
            folder = image_dir if reads_images else None
            file = check_coco_file(name, json_file, folder, needs_objects)
            train += [file] if is_trained else []
            test += [file] if is_tested else []
    of_data = fit_to_data(cfg, train, test, given)
    merge_opts(cfg, _opts_of(of_data))
    complaints_first = sorted([*settings, *of_data], key=lambda setting: bool(setting.key))
    args.notes += [f"From the data: {setting}" for setting in complaints_first]
    return cfg


def _opts_of(settings: Sequence[Setting]) -> list[str]:
    return [text for s in settings if s.key for text in (s.key, str(s.value))]


def _roles(names: Sequence[str], given: set[str], trains: bool) -> list[Setting]:
    """Settings that choose the datasets for training and evaluation, unless DATASETS is given."""
    others = names[1:] if len(names) > 1 or trains else names
    why = "those of --coco" + ", except the first" * (len(others) < len(names))
    roles = [Setting("DATASETS.TRAIN", (names[0],), "the first of --coco")] if trains else []
    roles.append(Setting("DATASETS.TEST", tuple(others), why))
    return [role for role in roles if role.key not in given]
