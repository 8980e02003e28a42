# Copyright (c) the d2_memfit developers.
"""A plan as part of a training run, and its file."""

import hashlib
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Optional, TypeVar, Union

import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from omegaconf import DictConfig

from ..common.errors import ConfigError, MemfitError, start_logging
from ..common.files import check_outputs, output_file
from ..config.lazy import cfg_of_lazy
from ..config.load import with_memfit_keys, with_settings
from ..job import Job, size_of, with_overrides
from ..memory import FIGURES, limit_library_caches, return_large_blocks, use_expandable_segments
from .device import DeviceModel
from .errors import one_line_errors
from .plan import plan_memory
from .plan_file import budget_in, planned, planned_yaml
from .text import answer_of_plan, describe_plan

__all__ = ["fit_config"]

logger = logging.getLogger(__name__)

_KEY = "# planned from the config "
_AS_MUCH = 1.05  # free memory differs a little each time

_Config = TypeVar("_Config", CfgNode, DictConfig)


def fit_config(cfg: _Config, trainer: Any = None) -> _Config:
    """Make a job fit MEMFIT.BUDGET_GB if MEMFIT.PLAN.ENABLED; else return the config unchanged.

    Call it on all ranks after ``default_setup``, before the trainer is made. Rank 0 plans, for the
    smallest budget of all ranks. The plan is logged and written to OUTPUT_DIR/memfit_plan.yaml. A
    resumed run reads it from there, unless its config has changed or less memory is free.

    Args:
        cfg: a config of yacs, or a LazyConfig, whose ``train.memfit.plan.enabled`` counts.
        trainer: the class that trains, with the ``build_*`` methods of ``DefaultTrainer``.

    Raises:
        ConfigError: on all ranks, if the job does not fit with the tiers of MEMFIT.PLAN.ALLOW, or a
            value cannot work.
        MemfitError: on the other ranks, if planning failed on rank 0 for another reason.
    """
    keys = cfg_of_lazy(cfg) if isinstance(cfg, DictConfig) else with_memfit_keys(cfg)
    if not keys.MEMFIT.PLAN.ENABLED:
        return cfg
    use_expandable_segments()  # before a budget is measured
    jobs: list[Job] = []

    def budget_here() -> Optional[float]:
        jobs.append(Job.from_any(cfg, trainer))
        start_logging(jobs[0].cfg.OUTPUT_DIR)
        return jobs[0].budget_gb

    budget_gb = min(_on_each_rank(budget_here))

    def plan_here() -> str:
        return _plan_of_this_run(cfg, jobs[0], budget_gb) if comm.is_main_process() else ""

    return planned(cfg, _on_each_rank(plan_here)[0])


def _on_each_rank(call: Callable[[], Any]) -> list[Any]:
    """Collect the results of all ranks. An error on one rank is raised on all, so none waits."""
    result, error, failure = None, None, None
    try:
        result = call()
    except Exception as e:
        error, kind = e, ConfigError if isinstance(e, ConfigError) else MemfitError
        failure = kind(f"rank {comm.get_rank()} has no plan: {type(e).__name__}: {e}")
    results, failures = zip(*comm.all_gather((result, failure)))
    for first in filter(None, (error, *failures)):
        raise first
    return [*results]


def _key_of(cfg: Union[CfgNode, DictConfig], job: Job) -> str:
    """Hash of the config before any measurement, and of the largest images of the job."""
    if isinstance(cfg, DictConfig):
        config = re.sub(r" at 0x[0-9a-f]+", "", str(with_overrides(cfg, {"train.output_dir": ""})))
    else:
        config = with_settings(with_memfit_keys(cfg), {"OUTPUT_DIR": ""}).dump()
    batches = job.batches
    largest = size_of(job.training_batch()), batches.num_instances, batches.assumptions
    return hashlib.sha256(f"{job.ranks} {largest} {config}".encode()).hexdigest()


def _plan_of_this_run(cfg: Union[CfgNode, DictConfig], job: Job, budget_gb: float) -> str:
    """The text of OUTPUT_DIR/memfit_plan.yaml, which is written if necessary."""
    if torch.device(job.cfg.MODEL.DEVICE).type == "cpu":
        return_large_blocks()  # memory used here must not count towards the budget later
        limit_library_caches()
    device = DeviceModel.choose(None, job.cfg.MODEL.DEVICE)  # now: a CPU's context is this process
    with one_line_errors():
        key = _key_of(cfg, job)
    path = Path(job.cfg.OUTPUT_DIR) / "memfit_plan.yaml"
    text = path.read_text() if path.is_file() else ""
    if FIGURES not in text:  # else it is the plan of an earlier run
        check_outputs([path])
    if text.startswith(_KEY + key):
        planned_gb = budget_in(text)
        if planned_gb <= budget_gb * _AS_MUCH:
            logger.info("The plan is read from %s", path)
            return text
        logger.info("%.2f GB are free, but %s is for %.2f GB", budget_gb, path, planned_gb)
    options = {"allow": job.cfg.MEMFIT.PLAN.ALLOW, "prefer": job.cfg.MEMFIT.PLAN.PREFER}
    say = partial(logger.info, "Planning: %s")
    plan = plan_memory(job, budget_gb, device=device, progress=say, **options)
    answer, budget = answer_of_plan(plan), f"MEMFIT.BUDGET_GB {plan.budget_gb:.4g}"
    logger.info("Plan for %s:\n%s\n\n%s", budget, answer, describe_plan(plan))
    if not plan.fits:
        raise ConfigError(f"{budget}: {'. '.join(answer.splitlines())}")
    text = f"{_KEY}{key}\n{planned_yaml(cfg, plan)}"
    with output_file(path, "w") as file:
        file.write(text)
    return text
