# Copyright (c) the d2_memfit developers.
"""The config, the job and its data, from the options of the command line."""

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Union

from detectron2.config import CfgNode
from omegaconf import DictConfig

from ..common.checks import usable_device, value_of
from ..common.errors import ConfigError
from ..config.cards import settings_of_card
from ..config.files import find_config_file, keys_in_own_files
from ..config.lazy import cfg_of_lazy, overrides_of
from ..config.load import load_cfg, merge_opts
from ..config.settings import check_settings
from ..data.coco_file import check_coco_file
from ..data.registration import register_coco
from ..data.settings import fit_to_data, goes_with_data
from ..job import GivenBatches, Job, load_lazy_config, with_overrides

Config = Union[CfgNode, DictConfig]


def is_lazy(config_file: str) -> bool:
    """Whether a config is a LazyConfig: a .py file, or the yaml file that its training wrote."""
    file = Path(config_file)
    if file.suffix != ".yaml" or not file.is_file():
        return file.suffix == ".py"
    return "\ndataloader:" in "\n" + file.read_text(errors="replace")


def load_config(args: argparse.Namespace, more: Sequence[str] = (), runs: bool = False) -> Config:
    """Load the config of the command line, with its budget and what follows from ``--coco``.

    ``args.notes`` gets a line for each setting from the data.

    Args:
        more: KEY VALUE pairs of the command, before the user's.
        runs: as for :func:`load_yaml`.
    """
    if is_lazy(args.config_file):
        check_lazy_options(args)
        project_functions(args)  # registers what the config names
        return load_lazy(args, more, runs)
    add_keys = project_functions(args)
    return load_yaml(args, add_keys, more, trains=bool(args.coco), runs=runs)  # the job checks more


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
    adds = [v for n, v in names.items() if n.startswith("add_") and n.endswith("config")]
    return [function for function in adds if _takes_a_config(function)]


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


def load_lazy(args: argparse.Namespace, more: Sequence[str] = (), runs: bool = True) -> DictConfig:
    """Load the LazyConfig of the command line, with its budget, as :func:`load_config`."""
    args.config_file = find_config_file(args.config_file, ".py")
    cfg = load_lazy_config(args.config_file, args.opts)
    cfg = _with_opts(cfg, [*opts_of_budget(args), *more])
    cfg = _with_opts(cfg, opts_of_fit(cfg_of_lazy(cfg), args))
    if runs:
        cfg.train.device = usable_device(cfg.train.device)
    return cfg


def _with_opts(cfg: DictConfig, opts: Sequence[str]) -> DictConfig:
    values = load_cfg("", opts)
    return with_overrides(cfg, overrides_of({key: value_of(values, key) for key in opts[::2]}))


def trainer_of(args: argparse.Namespace) -> Any:
    return find_function(args.trainer, "--trainer") if args.trainer else None


def find_function(name: str, option: str) -> Any:
    """Find the object named MODULE:NAME. Importing its module registers the project's models.

    Args:
        option: the command-line option, for messages.

    Raises:
        ConfigError: there is no such module or function, or the module cannot be imported.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as e:  # a project's code may raise anything
        raise ConfigError(
            f"{option} must be MODULE:NAME, such as train_net:Trainer, got {name!r}, which cannot "
            f"be imported ({type(e).__name__}: {e}). If it is in another folder, add --project "
            "FOLDER"
        ) from e


def job_of(args: argparse.Namespace, cfg: Config) -> Job:
    """Make the job of a config, with the trainer and the largest batch of the command line."""
    batch = find_function(args.batch, "--batch")(cfg) if args.batch else None
    if args.batch:
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
    given += budgets_in(args.opts) if given else []
    if given[1:]:
        raise ConfigError(f"{' and '.join(given)}: give only one")
    if args.card is not None:
        return _opts(settings_of_card(args.card))
    if budget is None:
        return []
    on_cpu = budget == "auto" and getattr(args, "device", None) == "cpu"
    return ["MEMFIT.BUDGET_GB", str(budget), *(["MODEL.DEVICE", "cpu"] if on_cpu else [])]


def budgets_in(opts: Sequence[str]) -> list[str]:
    """Those of the words that are keys of the budget, also of a LazyConfig."""
    return [word for word in opts if _key_of(word) in ("MEMFIT.BUDGET_GB", "MEMFIT.PRESET")]


def _key_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+").upper().removeprefix("TRAIN.")


def opts_of_fit(cfg: CfgNode, args: argparse.Namespace) -> list[str]:
    """KEY VALUE pairs for ``--fit``."""
    if not getattr(args, "fit", False):
        return []
    # A plan turns on "split", where the model can be split.
    values = {"MEMFIT.OOM.POLICY": "split"} if args.eval_only else {"MEMFIT.PLAN.ENABLED": "True"}
    if cfg.MEMFIT.BUDGET_GB is None and not cfg.MEMFIT.PRESET:
        values["MEMFIT.BUDGET_GB"] = "auto"
    given = set(map(_key_of, args.opts))
    return _opts({key: value for key, value in values.items() if key not in given})


def load_yaml(
    args: argparse.Namespace,
    add_keys: Sequence[Callable[..., Any]],
    more: Sequence[str] = (),
    *,
    trains: bool,
    ranks: Optional[int] = None,
    runs: bool = False,
) -> CfgNode:
    """Load a yaml config with its budget, and complete it from the datasets of ``--coco``.

    It is checked before the datasets are read. Only keys that the user has not given are set.
    Values in a file for other datasets do not apply to these. A plan made for COCO also applies to
    your own data, except for its schedule and classes. ``args.notes`` gets a line for each setting
    from the data.

    Args:
        add_keys: as for :func:`~d2_memfit.config.load.load_cfg`.
        more: KEY VALUE pairs of the command, before the user's.
        trains, ranks: as for :func:`~d2_memfit.config.settings.check_settings`.
        runs: whether the model runs here: on the CPU if there is no GPU, and with the images of
            datasets, which an estimate does not need.
    """
    opts = [*opts_of_budget(args), *more, *args.opts]
    cfg = load_cfg(args.config_file, (), add_keys, opts)
    file, names = cfg.SOLVER.clone(), [name for name, _, _ in args.coco]
    if len(set(names)) < len(names):
        raise ConfigError("--coco: a name is given twice")
    for dataset in args.coco:
        register_coco(*dataset)
    given = set(opts[::2])
    if names and args.config_file:
        of_file = keys_in_own_files(find_config_file(args.config_file))
        names_others = bool({"DATASETS.TRAIN", "DATASETS.TEST"} & of_file)
        if names_others and not {*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST} & set(names):
            of_file = {key for key in of_file if not goes_with_data(key)}
        given |= of_file
    others = names[1:] if names[1:] or trains else names
    roles = {"DATASETS.TRAIN": tuple(names[:1]), "DATASETS.TEST": tuple(others)}
    new = {key: value for key, value in roles.items() if names and key not in given}
    merge_opts(cfg, [*_opts(new), *opts])
    check_settings(cfg, ranks, trains)
    files = {}
    for name, json_file, image_dir in args.coco:
        is_trained = trains and name in cfg.DATASETS.TRAIN
        if is_trained or name in cfg.DATASETS.TEST:
            needs_objects = is_trained and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
            folder = image_dir if runs else None
            files[name] = check_coco_file(name, json_file, folder, needs_objects)
    train = [files[name] for name in cfg.DATASETS.TRAIN if trains and name in files]
    test = [files[name] for name in cfg.DATASETS.TEST if name in files]
    settings = fit_to_data(cfg, train, test, given)
    merge_opts(cfg, _opts({s.key: s.value for s in settings if s.key}))
    args.notes += [f"From the data: {setting}" for setting in settings]
    if runs and trains:
        args.notes += _batch_notes(file, cfg.SOLVER)
    merge_opts(cfg, opts_of_fit(cfg, args))
    if runs:
        cfg.MODEL.DEVICE = usable_device(cfg.MODEL.DEVICE, "MODEL.DEVICE" in args.opts[::2])
    return cfg


def _batch_notes(recipe: CfgNode, solver: CfgNode) -> list[str]:
    """A warning if the command changes the file's effective batch and not its learning rate."""
    factor = solver.IMS_PER_BATCH * solver.ACCUMULATION_STEPS
    factor /= recipe.IMS_PER_BATCH * recipe.ACCUMULATION_STEPS
    if factor == 1 or solver.REFERENCE_WORLD_SIZE or solver.BASE_LR != recipe.BASE_LR:
        return []
    return [
        f"SOLVER.IMS_PER_BATCH x ACCUMULATION_STEPS is {factor:.3g} times the batch of the config "
        f"file, but SOLVER.BASE_LR {solver.BASE_LR:g} is unchanged. Scale it with the batch "
        f"(arXiv:1706.02677): SOLVER.BASE_LR {solver.BASE_LR * factor:g}. Or keep the batch with "
        "SOLVER.ACCUMULATION_STEPS"
    ]


def _opts(settings: Mapping[str, Any]) -> list[str]:
    return [str(part) for setting in settings.items() for part in setting]
