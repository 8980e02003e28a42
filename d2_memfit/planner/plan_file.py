# Copyright (c) the d2_memfit developers.
"""Plans as text: a yacs config file, a LazyConfig file, or overrides, and the way back."""

import json
from pathlib import Path
from typing import Any, Union

import yaml
from detectron2.config import CfgNode
from omegaconf import DictConfig

from ..common.files import SafeLoader
from ..config.lazy import overrides_of
from ..config.load import get_cfg, with_memfit_keys, with_settings
from ..job import Job, LazyParts, with_overrides
from ..memory import FIGURES
from .plan import Plan
from .text import answer_of_plan, describe_plan

__all__ = ["budget_in", "keys_as_yaml", "lazy_file", "planned", "planned_yaml"]


def _settings(plan: Plan) -> dict[str, Any]:
    """The plan's settings, without planning again."""
    return {**plan.settings, "MEMFIT.PLAN.ENABLED": False}


def planned_yaml(cfg: Union[CfgNode, DictConfig], plan: Plan) -> str:
    """Write a plan as YAML, with its description as a comment.

    For a yacs config it is a complete config file for ``tools/train_net.py --config-file``, with
    all differences from the defaults. For a LazyConfig it holds overrides.
    """
    comment, settings = f"{_comment(plan)}{FIGURES}{json.dumps(plan.figures)}\n", _settings(plan)
    if isinstance(cfg, DictConfig):
        return comment + yaml.safe_dump(overrides_of(settings), sort_keys=False)
    complete = with_settings(with_memfit_keys(cfg), settings)
    return comment + CfgNode(_differences(complete, get_cfg(), {"VERSION", *settings})).dump()


def keys_as_yaml(job: Job, plan: Plan) -> str:
    """The keys that a plan sets, to copy into the job's config; "" if it does not fit."""
    if not plan.fits:
        return ""
    if isinstance(job.parts, LazyParts):
        return yaml.safe_dump(overrides_of(plan.settings), sort_keys=False)
    cfg = with_settings(job.cfg, plan.settings)
    return CfgNode(_differences(cfg, cfg, {*plan.settings})).dump()


def planned(cfg: Union[CfgNode, DictConfig], text: str) -> Union[CfgNode, DictConfig]:
    """The config with a plan that :func:`planned_yaml` wrote."""
    keys = yaml.load(text, SafeLoader)
    if isinstance(cfg, DictConfig):
        return with_overrides(cfg, keys)
    complete = with_memfit_keys(cfg)
    complete.MEMFIT.BUDGET_GB = None  # "auto" is not a number
    complete.merge_from_other_cfg(type(complete)(keys))
    complete.OUTPUT_DIR = cfg.OUTPUT_DIR  # a plan may be copied from another folder
    if cfg.is_frozen():
        complete.freeze()
    return complete


def budget_in(text: str) -> float:
    """Budget, in GB, of a plan that :func:`planned_yaml` wrote."""
    keys = yaml.load(text, SafeLoader)
    return keys["MEMFIT"]["BUDGET_GB"] if "MEMFIT" in keys else keys["train.memfit.budget_gb"]


def lazy_file(config_file: str, opts: list[str], plan: Plan) -> str:
    """Make a LazyConfig file that applies a plan to another file.

    Args:
        config_file: path of the other file.
        opts: its overrides on the command line, such as ``train.max_iter=10``.
    """
    overrides = overrides_of(_settings(plan))
    return (
        f"{_comment(plan)}\n"
        "from detectron2.config import LazyConfig\n\n"
        "from d2_memfit.job import with_overrides\n\n"
        f"_planned = LazyConfig.load({str(Path(config_file).resolve())!r})\n"
        f"_planned = LazyConfig.apply_overrides(_planned, {list(opts)!r})\n"
        f"_planned = with_overrides(_planned, {overrides!r})\n"
        "globals().update({name: _planned[name] for name in _planned})\n"
    )


def _comment(plan: Plan) -> str:
    text = f"{answer_of_plan(plan)}\n\n{describe_plan(plan)}"
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


def _differences(
    cfg: CfgNode, defaults: CfgNode, always: set[str], prefix: str = ""
) -> dict[str, Any]:
    """Values that differ from the defaults, and values of the keys in ``always``."""
    differences: dict[str, Any] = {}
    for key, value in cfg.items():
        if isinstance(value, CfgNode):
            nested = _differences(value, defaults.get(key, CfgNode()), always, f"{prefix}{key}.")
            if nested:
                differences[key] = CfgNode(nested)
        elif key not in defaults or defaults[key] != value or prefix + key in always:
            differences[key] = value
    return differences
