# Copyright (c) the d2_memfit developers.
"""The config, the job and its data, from the options of the command line."""

import importlib
import inspect
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional, Union

from detectron2.config import CfgNode
from omegaconf import DictConfig

from ..common.checks import usable_device, value_of
from ..common.errors import ConfigError
from ..common.files import checked
from ..config.cards import settings_of_card
from ..config.files import find_config_file, keys_in_own_files
from ..config.lazy import cfg_of_lazy, overrides_of
from ..config.load import load_cfg, merge_opts, with_settings
from ..config.settings import check_settings
from ..data.coco_file import check_coco_file
from ..data.hold_out import hold_out
from ..data.registration import register_coco
from ..data.settings import fit_to_data, goes_with_data
from ..job import GivenBatches, Job, load_lazy_config, with_overrides

AddKeys = Sequence[Callable[..., Any]]
Config = Union[CfgNode, DictConfig]


def is_lazy(config_file: str) -> bool:
    """Whether a config is a LazyConfig: a .py file, or the yaml file that its training wrote."""
    file = Path(config_file)
    if file.suffix != ".yaml" or not file.is_file():
        return file.suffix == ".py"
    return "\ndataloader:" in "\n" + Path(checked(file)).read_text(errors="replace")


def load_config(args: Namespace, runs: bool = False, own: Mapping[str, Any] = {}) -> Config:
    """Load the config of the command line, with its budget and what follows from ``--coco``.

    ``args.notes`` gets a line for each setting from the data.

    Args:
        runs: as for :func:`load_yaml`.
        own: settings of the command. In a yaml config, those of the user's KEY VALUE come first.
    """
    if is_lazy(args.config_file):
        check_lazy_options(args)
        project_functions(args)  # registers what the config names
        return load_lazy(args, runs, own)
    add_keys, trains = project_functions(args), bool(args.coco)
    cfg = load_yaml(args, add_keys, trains=trains, ranks=None, runs=runs)  # the job checks more
    return with_settings(cfg, {k: v for k, v in own.items() if k not in args.opts[::2]})


def project_functions(args: Namespace) -> list[Callable[..., Any]]:
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


def check_lazy_options(args: Namespace, *others: str) -> None:
    """Raise :class:`ConfigError` for options that a LazyConfig does not take."""
    for name in ("coco", "trainer", *others):
        if getattr(args, name, None):
            raise ConfigError(
                f"--{name.replace('_', '-')} only works with yaml configs. A LazyConfig itself "
                "says what is built"
            )


def load_lazy(args: Namespace, runs: bool = True, own: Mapping[str, Any] = {}) -> DictConfig:
    """Load the LazyConfig of the command line, with its budget, as :func:`load_config`."""
    args.config_file = find_config_file(args.config_file, ".py")
    opts = opts_of_budget(args)
    checked = load_cfg("", opts)
    settings = {**own, **{key: value_of(checked, key) for key in opts[::2]}}
    cfg = with_overrides(load_lazy_config(args.config_file, args.opts), overrides_of(settings))
    cfg = with_overrides(cfg, overrides_of(settings_of_fit(cfg_of_lazy(cfg), args)))
    if runs:
        cfg.train.device = usable_device(cfg.train.device)
    return cfg


def trainer_of(args: Namespace) -> Any:
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


def job_of(args: Namespace, cfg: Config) -> Job:
    """Make the job of a config, with the trainer and the largest batch of the command line."""
    batch = find_function(args.batch, "--batch")(cfg) if args.batch else None
    if args.batch:
        GivenBatches(batch)  # raises if it is not a batch
    sizes = {"image_size": args.image_size, "num_instances": args.instances}
    return Job.from_any(cfg, trainer_of(args), args.num_gpus, batch=batch, **sizes)


def opts_of_budget(args: Namespace) -> list[str]:
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
        return [str(part) for setting in settings_of_card(args.card).items() for part in setting]
    if budget is None:
        return []
    on_cpu = budget == "auto" and getattr(args, "device", None) == "cpu"
    return ["MEMFIT.BUDGET_GB", str(budget), *(["MODEL.DEVICE", "cpu"] if on_cpu else [])]


def budgets_in(opts: Sequence[str]) -> list[str]:
    """Those of the words that are keys of the budget, also of a LazyConfig."""
    return [word for word in opts if _key_of(word) in ("MEMFIT.BUDGET_GB", "MEMFIT.PRESET")]


def _key_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+").upper().removeprefix("TRAIN.")


def settings_of_fit(cfg: CfgNode, args: Namespace) -> dict[str, Any]:
    """Keys and values for ``--fit``."""
    if not getattr(args, "fit", False):
        return {}
    # A plan turns on "split" itself, where the model can be split.
    plan, split = {"MEMFIT.PLAN.ENABLED": True}, {"MEMFIT.OOM.POLICY": "split"}
    settings: dict[str, Any] = split if args.eval_only else plan
    if cfg.MEMFIT.BUDGET_GB is None and not cfg.MEMFIT.PRESET:
        settings["MEMFIT.BUDGET_GB"] = "auto"
    return {k: v for k, v in settings.items() if k not in map(_key_of, args.opts)}


def load_yaml(
    args: Namespace, add_keys: AddKeys, *, trains: bool, ranks: Optional[int], runs: bool
) -> CfgNode:
    """Load a yaml config with its budget, and complete it from the datasets of ``--coco``.

    It is checked before the datasets are read, and before ``--hold-out`` makes two of one. Only
    keys that the user has not given are set. Values in a file for other datasets do not apply to
    these. A plan made for COCO also applies to your own data, except for its schedule and classes.
    ``args.notes`` gets a line for each setting from the data.

    Args:
        add_keys: as for :func:`~d2_memfit.config.load.load_cfg`.
        trains, ranks: as for :func:`~d2_memfit.config.settings.check_settings`.
        runs: whether the model runs here: on the CPU if there is no GPU, and with the images of
            datasets, which an estimate does not need.
    """
    opts = [*opts_of_budget(args), *args.opts]
    cfg = load_cfg(args.config_file, (), add_keys, opts)
    file, given = cfg.clone(), set(opts[::2])
    merge_opts(cfg, opts)
    check_settings(cfg, ranks, trains)
    if getattr(args, "hold_out", None) is not None:
        args.coco = hold_out(args.coco, args.hold_out, cfg.OUTPUT_DIR, args.resume)
    names = [name for name, _, _ in args.coco]
    if len(set(names)) < len(names):
        raise ConfigError("--coco: a name is given twice")
    for dataset in args.coco:
        register_coco(*dataset)
    if names and args.config_file:
        of_file = keys_in_own_files(find_config_file(args.config_file))
        names_others = bool({"DATASETS.TRAIN", "DATASETS.TEST"} & of_file)
        if names_others and not {*file.DATASETS.TRAIN, *file.DATASETS.TEST} & set(names):
            of_file = {key for key in of_file if not goes_with_data(key)}
        given |= of_file
    others = names[1:] if names[1:] or trains else names
    roles = {"DATASETS.TRAIN": tuple(names[:1]), "DATASETS.TEST": tuple(others)}
    cfg = with_settings(cfg, {k: v for k, v in roles.items() if names and k not in given})
    trained, tested = (cfg.DATASETS.TRAIN if trains else ()), cfg.DATASETS.TEST
    files = {}
    for name, json_file, folder in args.coco:
        if name in (*trained, *tested):
            needs_objects = name in trained and cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS
            files[name] = check_coco_file(name, json_file, folder if runs else None, needs_objects)
    train, test = ([files[n] for n in part if n in files] for part in (trained, tested))
    settings = fit_to_data(cfg, train, test, given)
    cfg = with_settings(cfg, {s.key: s.value for s in settings if s.key})
    args.notes += [f"From the data: {setting}" for setting in settings]
    if runs and trains:
        args.notes += _batch_notes(file.SOLVER, cfg.SOLVER)
    cfg = with_settings(cfg, settings_of_fit(cfg, args))
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
