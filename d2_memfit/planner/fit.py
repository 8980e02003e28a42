"""A plan as part of a training run, and as a file."""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from detectron2.config import CfgNode
from detectron2.utils import comm

from ..config import check_config, get_cfg, with_memfit_keys, with_settings
from ..errors import ConfigError, MemfitError
from ..logs import start_logging
from ..memory import (
    limit_onednn_cache,
    return_large_blocks,
    segments_expand,
    use_expandable_segments,
)
from ..presets import with_budget
from .plan import Plan
from .search import plan_memory
from .text import describe_plan, why_it_does_not_fit
from .worst_case import worst_case

__all__ = ["fit_config", "planned_config", "planned_yaml"]

logger = logging.getLogger(__name__)

_KEY = "# planned from the config "
_AS_MUCH = 1.05  # what is free differs a little each time


def fit_config(cfg: CfgNode) -> CfgNode:
    """Make a config fit MEMFIT.BUDGET_GB, if MEMFIT.PLAN.ENABLED; else it is returned as it is.

    Call it on all ranks after ``default_setup``, where the trainer is made: the first rank plans,
    for the smallest budget where that is measured on each. The plan is logged, and is in
    OUTPUT_DIR/memfit_plan.yaml. A run that is resumed takes it from there, unless its config is
    another one, or less memory is free.

    Raises:
        ConfigError: on all ranks, if it does not fit with the tiers of MEMFIT.PLAN.ALLOW, or a
            value cannot work.
        MemfitError: on the other ranks, if planning has failed on the first for another reason.
    """
    if not with_memfit_keys(cfg).MEMFIT.PLAN.ENABLED:
        return cfg
    cfg = with_memfit_keys(cfg)
    check_config(cfg)
    start_logging(cfg.OUTPUT_DIR)
    use_expandable_segments()
    budget_gb = min(_on_each_rank(lambda: with_budget(cfg).MEMFIT.BUDGET_GB))
    planned = with_settings(cfg, {"MEMFIT.BUDGET_GB": budget_gb})
    is_main = comm.is_main_process()
    text = _on_each_rank(lambda: _plan_of_this_run(planned, _key_of(cfg)) if is_main else "")[0]
    planned.merge_from_other_cfg(CfgNode(yaml.safe_load(text)))
    if cfg.is_frozen():
        planned.freeze()
    return planned


def _on_each_rank(call: Callable[[], Any]) -> list[Any]:
    """The results of all ranks. An error of one is an error of all, so that none waits."""
    result, error = None, None
    try:
        result = call()
    except Exception as e:
        error = e
    text = f"{type(error).__name__}: {error}"
    outcomes = comm.all_gather((result, error and text, isinstance(error, ConfigError)))
    if error is not None:
        raise error
    for rank, (_, failure, is_config_error) in enumerate(outcomes):
        if failure is not None:
            kind = ConfigError if is_config_error else MemfitError
            raise kind(f"rank {rank} has no plan: {failure}")
    return [result for result, _, _ in outcomes]


def _key_of(cfg: CfgNode) -> str:
    """What a plan is for, wherever it runs: the config, before anything is measured, and the
    largest of its images.
    """
    case = worst_case(cfg, comm.get_world_size())
    without_folder = with_settings(cfg, {"OUTPUT_DIR": ""})
    text = f"{comm.get_world_size()} {case} {without_folder.dump()}"
    return hashlib.sha256(text.encode()).hexdigest()


def _plan_of_this_run(cfg: CfgNode, key: str) -> str:
    """The text of OUTPUT_DIR/memfit_plan.yaml, which is written if need be."""
    budget_gb = cfg.MEMFIT.BUDGET_GB
    path = Path(cfg.OUTPUT_DIR) / "memfit_plan.yaml"
    text = path.read_text() if path.is_file() else ""
    if text.startswith(_KEY + key):
        planned_gb = yaml.safe_load(text)["MEMFIT"]["BUDGET_GB"]
        if planned_gb <= budget_gb * _AS_MUCH:
            logger.info("The plan is that of %s", path)
            return text
        logger.info("%.2f GB are free, and %s is for %.2f GB", budget_gb, path, planned_gb)
    if torch.device(cfg.MODEL.DEVICE).type == "cpu":
        return_large_blocks()  # what dry runs ask for must not count towards the budget later
        limit_onednn_cache()
    elif not segments_expand():
        logger.warning(
            "CUDA was started, or PYTORCH_CUDA_ALLOC_CONF set, without expandable segments, so the "
            "plan is made for an allocator that leaves more memory unused. To let segments grow, "
            "start the program with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    plan = plan_memory(
        cfg,
        budget_gb,
        comm.get_world_size(),
        cfg.MEMFIT.PLAN.ALLOW,
        progress=lambda line: logger.info("Planning: %s", line),
    )
    logger.info("Plan for MEMFIT.BUDGET_GB %.4g:\n%s", plan.budget_gb, describe_plan(plan))
    if not plan.fits:
        raise ConfigError(why_it_does_not_fit(plan))
    text = f"{_KEY}{key}\n{planned_yaml(cfg, plan)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return text


def planned_config(cfg: CfgNode, plan: Plan) -> CfgNode:
    """The config with the plan's settings, which is not planned again."""
    return with_settings(with_memfit_keys(cfg), {**plan.settings, "MEMFIT.PLAN.ENABLED": False})


def planned_yaml(cfg: CfgNode, plan: Plan) -> str:
    """A config file with the plan in it, for ``tools/train_net.py --config-file``.

    It has what differs from the defaults, and stands by itself.
    """
    planned = planned_config(cfg, plan)
    comment = "".join(f"# {line}".rstrip() + "\n" for line in describe_plan(plan).splitlines())
    of_plan = {"VERSION", "MEMFIT.PLAN.ENABLED", *plan.settings}
    return comment + CfgNode(_differences(planned, get_cfg(), of_plan)).dump()


def _differences(
    cfg: CfgNode, defaults: CfgNode, always: set[str], prefix: str = ""
) -> dict[str, Any]:
    """What is not as in the defaults, and what is named by its whole key."""
    differences: dict[str, Any] = {}
    for key, value in cfg.items():
        if isinstance(value, CfgNode):
            nested = _differences(value, defaults.get(key, CfgNode()), always, f"{prefix}{key}.")
            if nested:
                differences[key] = CfgNode(nested)
        elif key not in defaults or defaults[key] != value or prefix + key in always:
            differences[key] = value
    return differences
