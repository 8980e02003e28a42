# Copyright (c) the d2_memfit developers.
"""From a job to its trainer: the options that its keys ask for, and one call that makes it."""

import logging
from typing import Any, Optional

import torch
from torch import nn

from .. import compat
from ..common.checks import value_of
from ..config import default_keys
from ..errors import ConfigError
from ..job import Job
from ..memory import enforce_budget, use_expandable_segments
from ..techniques import apply_techniques, techniques_on
from .hooks import job_hooks
from .train_loop import AccumulatingTrainer

__all__ = ["build_trainer", "check_applied", "check_run_step", "trainer_options"]

logger = logging.getLogger(__name__)

_OF_RUN_STEP = (
    "SOLVER.ACCUMULATION_STEPS",
    "MEMFIT.MICRO_BATCH",
    "MEMFIT.COST_MODEL.BYTES",
    "MEMFIT.OOM.POLICY",
    "MEMFIT.AMP_DTYPE",
    "MEMFIT.EMA_DECAY",
    "MEMFIT.MONITOR.SNAPSHOT_ON_OOM",
)


def trainer_options(job: Job) -> dict[str, Any]:
    """The keyword arguments of :class:`AccumulatingTrainer` that a job's keys ask for.

    Raises:
        ConfigError: the job is to be planned, and was not.
    """
    if job.cfg.MEMFIT.PLAN.ENABLED:
        raise ConfigError(
            "MEMFIT.PLAN.ENABLED True: a trainer does not plan. Call d2_memfit.fit_config before, "
            "as in Trainer(fit_config(cfg, Trainer)), or set it False"
        )
    return {
        "accumulation_steps": job.geometry.accumulation_steps,
        "precision": job.precision(),
        "micro_batch_size": job.geometry.micro_batch_size,
        "cost_model": job.settings.cost_model,
        "recovery": job.recovery,
        "normalizers": job.normalizers,
        "ema_decay": job.cfg.MEMFIT.EMA_DECAY,
    }


def check_applied(job: Job, parts: set[str], why: str) -> None:
    """Raise :class:`ConfigError` if a technique of one of these parts is on.

    Args:
        parts: as ``Technique.part``.
        why: why it would not be applied, and what to do.
    """
    for part in parts:
        for name in techniques_on(part, job.cfg):
            raise ConfigError(f"technique {name} is on and would do nothing: {why}")


def check_run_step(job: Job, trainer: type, inner: type[AccumulatingTrainer]) -> None:
    """Raise :class:`ConfigError` if a key is set that only ``AccumulatingTrainer.run_step`` reads.

    Args:
        trainer, inner: the classes of a trainer and of its ``_trainer``. The ``run_step`` of one
            does not call that one.
    """
    defaults = default_keys()
    values = {key: value_of(job.cfg, key) for key in _OF_RUN_STEP}
    asked = [f"{key} {v}" for key, v in values.items() if v != value_of(defaults, key)]
    if asked:
        is_inner = inner.run_step is not AccumulatingTrainer.run_step
        cls, step = (inner, "super()") if is_inner else (trainer, "self._trainer")
        raise ConfigError(
            f"{', '.join(asked)}: {cls.__name__}.run_step does not call {step}.run_step(), which "
            "reads these keys. Call it. For losses of your own: self._trainer.loss_fn = FUNCTION"
        )


def build_trainer(
    job: Job,
    model: Optional[nn.Module] = None,
    data_loader: Optional[Any] = None,
    optimizer: Optional[torch.optim.Optimizer] = None,
    **kwargs: Any,
) -> AccumulatingTrainer:
    """Build a trainer with the job's accumulation, precision, recovery, techniques and budget.

    Args:
        model: on the job's device; None builds the job's. DDP around it is replaced.
        data_loader: of this rank; None builds the job's.
        optimizer: of the model's parameters; None is the job's own.
        kwargs: other arguments of :class:`AccumulatingTrainer`, such as ``ema_decay``.

    Raises:
        ConfigError: a technique or recovery cannot work with the model or optimizer, or a key would
            do nothing.
    """
    options = {
        **trainer_options(job),
        "loss_fn": job.parts.loss_fn,
        "clip_gradients": job.parts.clip_gradients(),
        **kwargs,
    }
    if data_loader is not None:
        why = "build_trainer got a data_loader. Leave that out, or turn the technique off"
        check_applied(job, {"config", "loader"}, why)
    if job.budget_gb is not None:
        use_expandable_segments()
    enforce_budget(job.budget_gb, job.cfg.MODEL.DEVICE)
    model = job.parts.build_model(job.cfg.MODEL.DEVICE) if model is None else model
    model = apply_techniques("model", compat.without_ddp(model), job.cfg)
    optimizer = job.parts.build_optimizer(model) if optimizer is None else optimizer
    optimizer = apply_techniques("optimizer", optimizer, job.cfg)
    trainer = AccumulatingTrainer(
        compat.create_ddp_model(model, **job.ddp_options()),
        job.build_train_loader() if data_loader is None else data_loader,
        optimizer,
        **options,
    )
    if job.cfg.MEMFIT.EVALUATION.ON_DISK or techniques_on("evaluation", job.cfg):
        logger.info("MEMFIT.EVALUATION is for what runs within d2_memfit.engine.evaluating")
    hooks = job_hooks(job)
    trainer.register_hooks(hooks)
    logger.info(
        "These hooks run in trainer.train(start_iter, max_iter), not in a loop of run_step(): %s",
        ", ".join(type(hook).__name__ for hook in hooks),
    )
    trainer.needs_train = job.cfg.MEMFIT.MONITOR != default_keys().MEMFIT.MONITOR
    return trainer
