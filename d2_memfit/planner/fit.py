"""A plan as part of a training run, and as a file."""

import hashlib
import logging
from pathlib import Path
from typing import Any

import torch
import yaml
from detectron2.config import CfgNode
from detectron2.utils import comm

from ..config import check_config, get_cfg, with_memfit_keys, with_settings
from ..errors import ConfigError
from ..logs import start_logging
from ..memory import return_large_blocks
from ..presets import with_preset
from .plan import Plan
from .search import plan_memory
from .text import describe_plan, why_it_does_not_fit

__all__ = ["fit_config", "planned_config", "planned_yaml"]

logger = logging.getLogger(__name__)

_KEY = "# planned from the config "


def fit_config(cfg: CfgNode) -> CfgNode:
    """Make a config fit MEMFIT.BUDGET_GB, if MEMFIT.PLAN.ENABLED; else it is returned as it is.

    Call it on all ranks after ``default_setup``, where the trainer is made: the first rank plans.
    The plan is logged, and is in OUTPUT_DIR/memfit_plan.yaml. A run that is resumed takes it from
    there, unless its config is another one.

    Raises:
        ConfigError: on all ranks, if it does not fit with the tiers of MEMFIT.PLAN.ALLOW, or a
            value cannot work.
    """
    if not with_memfit_keys(cfg).MEMFIT.PLAN.ENABLED:
        return cfg
    cfg = with_preset(with_memfit_keys(cfg))
    check_config(cfg)
    start_logging(cfg.OUTPUT_DIR)
    text, error = "", None
    if comm.is_main_process():
        try:
            text = _plan_of_this_run(cfg)
        except ConfigError as e:
            error = str(e)
    text, error = comm.all_gather((text, error))[0]
    if error is not None:
        raise ConfigError(error)
    planned = cfg.clone()
    planned.defrost()
    planned.merge_from_other_cfg(CfgNode(yaml.safe_load(text)))
    if cfg.is_frozen():
        planned.freeze()
    return planned


def _plan_of_this_run(cfg: CfgNode) -> str:
    """The text of OUTPUT_DIR/memfit_plan.yaml, which is written if need be."""
    world_size = comm.get_world_size()
    without_folder = with_settings(cfg, {"OUTPUT_DIR": ""})
    key = hashlib.sha256(f"{world_size} {without_folder.dump()}".encode()).hexdigest()
    path = Path(cfg.OUTPUT_DIR) / "memfit_plan.yaml"
    if path.is_file() and path.read_text().startswith(_KEY + key):
        logger.info("The plan is that of %s", path)
        return path.read_text()
    if torch.device(cfg.MODEL.DEVICE).type == "cpu":
        return_large_blocks()  # what dry runs ask for must not count towards the budget later
    plan = plan_memory(
        cfg,
        cfg.MEMFIT.BUDGET_GB,
        world_size,
        cfg.MEMFIT.PLAN.ALLOW,
        progress=lambda line: logger.info("Planning: %s", line),
    )
    logger.info("Plan for MEMFIT.BUDGET_GB %g:\n%s", plan.budget_gb, describe_plan(plan))
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
