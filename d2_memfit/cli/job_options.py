# Copyright (c) the d2_memfit developers.
"""The job and its largest batch, from the options of the command line."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Optional, Union

from detectron2.config import CfgNode
from omegaconf import DictConfig

from ..common.checks import check_positive_int
from ..config.files import find_config_file
from ..config.load import load_cfg
from ..config.settings import check_settings
from ..errors import ConfigError, ConfigErrors, UnknownKeyError
from ..job import (
    PROJECT,
    GivenBatches,
    Job,
    find_function,
    load_lazy_config,
    projects_of,
)
from .options import check_opts, with_data, with_opts

__all__ = [
    "check_lazy_options",
    "image_size_of",
    "is_lazy",
    "job_of",
    "load_any_config",
]

Config = Union[CfgNode, DictConfig]


def is_lazy(config_file: str) -> bool:
    """Whether a config is a LazyConfig: a .py file, or the yaml file that its training wrote."""
    file = Path(config_file)
    if file.suffix != ".yaml" or not file.is_file():
        return file.suffix == ".py"
    with file.open(errors="replace") as f:
        return any(line.startswith("dataloader:") for line in f.read(2**20).splitlines())


def load_any_config(
    args: argparse.Namespace, opts: Sequence[str], say: Callable[[str], None]
) -> Config:
    """Load the config of the command line, with the settings that follow from ``--coco``.

    ``args.notes`` gets a line for each of them, and one for the keys of a project.

    Args:
        opts: KEY VALUE pairs placed before the user's.
        say: called with lines about progress.
    """
    args.notes = []
    if is_lazy(args.config_file):
        return _load_lazy(args, opts)
    check_opts(args.opts)
    if not args.project:  # a project may set everything in its keys
        find_config_file(args.config_file)
    # Importing the trainer also registers what the config names.
    guessed = projects_of(args.trainer) if args.trainer else []
    if guessed and not args.project:
        names = " --project ".join(guessed)
        args.notes.append(f"Added the project's keys, as with: --project {names}")
    add_keys = [find_function(name) for name in args.project or guessed]
    opts = [*opts, *args.opts]
    try:
        recipe = load_cfg(args.config_file, (), add_keys, opts)
        check = partial(check_settings, trains=bool(args.coco))  # the job checks the rest
        cfg, settings = with_data(recipe, args.coco, args.config_file, opts, check, progress=say)
    except ConfigError as e:
        errors = getattr(e, "errors", [e])
        for i, error in enumerate(errors):
            if isinstance(error, UnknownKeyError):
                errors[i] = ConfigError(
                    f"{error}. If a project adds it, name the function that does: --project "
                    f"MODULE:FUNCTION, such as {PROJECT}; or its trainer: --trainer MODULE:CLASS"
                )
        raise ConfigErrors(errors) from e
    settings = sorted(settings, key=lambda setting: bool(setting.key))  # complaints first
    args.notes += [f"From the data: {setting}" for setting in settings]
    return cfg


def check_lazy_options(args: argparse.Namespace) -> None:
    """Raise :class:`ConfigError` for options that a LazyConfig does not take."""
    if args.coco or args.trainer:
        option = "--coco" if args.coco else "--trainer"
        raise ConfigError(
            f"{option} only works with yaml configs. A LazyConfig itself says what is built"
        )


def _load_lazy(args: argparse.Namespace, opts: Sequence[str]) -> DictConfig:
    check_lazy_options(args)
    for name in args.project:
        find_function(name)
    args.config_file = find_config_file(args.config_file, ".py")
    return with_opts(load_lazy_config(args.config_file, args.opts), opts)


def job_of(args: argparse.Namespace, cfg: Config) -> Job:
    """Make the job of a config, with the trainer and the largest batch of the command line."""
    trainer = find_function(args.trainer, "--trainer") if args.trainer else None
    batch = None
    if args.batch:
        batch = find_function(args.batch, "--batch")(cfg)
        GivenBatches(batch)  # raises if it is not a batch
    if args.instances is not None:
        check_positive_int("--instances", args.instances)
    return Job.from_any(
        cfg,
        trainer,
        args.num_gpus,
        batch=batch,
        image_size=image_size_of(args.image_size),
        num_instances=args.instances,
    )


def image_size_of(text: Optional[str]) -> Optional[tuple[int, int]]:
    if text is None:
        return None
    try:
        height, width = (int(part) for part in text.lower().replace("x", ",").split(","))
    except ValueError:
        raise ConfigError(f"--image-size must be HEIGHT,WIDTH in pixels, got {text!r}") from None
    check_positive_int("--image-size", height)
    check_positive_int("--image-size", width)
    return height, width
